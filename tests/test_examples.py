"""The examples run, and do what they say."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from gtracer import Clip, SGDTracer

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_of_them_are_here():
    """A new one wants a test."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "accelerate_loop",
        "huggingface_trainer",
        "lightning_module",
        "timm_style",
    }


def test_accelerate(capsys):
    """The loss of the same loop without Accelerate."""
    pytest.importorskip("accelerate")
    found = example("accelerate_loop").main(epochs=2, shuffle=False)
    assert "trace_ratio" in capsys.readouterr().out
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    x = torch.randn(256, 8)
    y = (x.sum(1) > 0).long()
    opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9, clip=Clip(norm=1.0))
    for _ in range(2):
        for a, b in zip(x.split(32), y.split(32), strict=True):
            loss = opt.step(lambda a, b: cross_entropy(model(a), b), a, b)
    assert found == pytest.approx(loss.item(), rel=1e-5)


def test_huggingface(tmp_path):
    pytest.importorskip("transformers")
    trainer = example("huggingface_trainer").main(str(tmp_path), epochs=1)
    assert any("trace_ratio" in row for row in trainer.state.log_history)


def test_timm_style():
    """Both loops are `step(closure)` with either engine; the penalised one's loss has its penalty in it."""
    module = example("timm_style")
    losses = {}
    for engine in ("finite-difference", "exact"):
        model = module.network()
        options = {"rho": 1e-3, "delta": 1e-2, "engine": engine, "clip": Clip(norm=1.0)}
        opt = SGDTracer(model.parameters(), lr=0.05, momentum=0.9, model=model, **options)
        for x, y in module.batches():
            opt.step(lambda x, y, model=model: cross_entropy(model(x), y), x, y)
        losses[engine] = opt.stats.loss + (1e-3 * opt.stats.trace_ratio if engine == "exact" else 0)
    assert module.with_second_pass() == pytest.approx(losses["finite-difference"], rel=1e-4)
    assert module.with_penalty() == pytest.approx(losses["exact"], rel=1e-4)


# Lightning.


@pytest.fixture
def lightning():
    pytest.importorskip("lightning")
    return example("lightning_module")


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def by_hand(module, dtype=None, epochs=2):
    """The same steps by a plain loop."""
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x.sum(1) > 0).long()
    model = module()
    opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for a, b in zip(x.split(32), y.split(32), strict=True):

            def closure(a=a, b=b):
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                    return cross_entropy(model.net(a), b)

            opt.step(closure)
    return weights(model)


@pytest.mark.parametrize(("precision", "dtype"), [("32-true", None), ("bf16-mixed", torch.bfloat16)])
@pytest.mark.parametrize("kind", ["Automatic", "Manual"])
def test_lightning(lightning, precision, dtype, kind):
    """The trajectory of the plain loop; T is in the log."""
    trainer = lightning.main(getattr(lightning, kind), precision)
    tolerance = {"atol": 1e-6} if dtype is None else {"atol": 2e-2}
    expected = by_hand(lightning.Automatic, dtype)
    torch.testing.assert_close(weights(trainer.lightning_module), expected, rtol=0, **tolerance)
    assert trainer.callback_metrics["tracer/trace_ratio"] > 0
    assert trainer.callback_metrics["tracer/penalty_ratio"] > 0


@pytest.mark.parametrize(
    ("words", "message"), [({"accumulate_grad_batches": 2}, "batches="), ({"precision": "16-mixed"}, "bf16-mixed")]
)
def test_lightning_refuses_what_it_would_get_wrong(lightning, words, message):
    """Asked directly: on a CPU Lightning itself takes bfloat16 for float16."""
    from gtracer.integrations.lightning import TracerCallback

    module = lightning.Automatic()
    optimizers = [module.configure_optimizers()]
    trainer = SimpleNamespace(
        **{"accumulate_grad_batches": 1, "precision": "32-true", "optimizers": optimizers} | words
    )
    with pytest.raises(RuntimeError, match=message):
        TracerCallback().on_train_start(trainer, module)
    trainer.optimizers = [torch.optim.SGD(module.parameters())]
    TracerCallback().on_train_start(trainer, module)
    trainer.optimizers = optimizers
    TracerCallback().on_train_start(trainer, lightning.Manual())
