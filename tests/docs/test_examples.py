"""The examples run, and do what they say."""

import copy
import importlib.util

import pytest
import torch
from torch.nn.functional import cross_entropy

from gtracer import Clip, SGDTracer, TracerPenalty
from support.places import ROOT

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


def example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def test_all_of_them_are_here():
    """A new one wants a test."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "accelerate_loop",
        "captured_step",
        "huggingface_trainer",
        "lightning_module",
        "timm_style",
    }


@pytest.fixture
def accelerate():
    """Its state outlives an Accelerator, and refuses one in another precision."""
    state = pytest.importorskip("accelerate.state")

    def reset():
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()

    reset()
    yield example("accelerate_loop")
    reset()


def without_accelerate(accumulate=1, dtype=None, **own):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
    model = torch.nn.Sequential(*layers)
    x = torch.randn(256, 8)
    batches = list(zip(x.split(32), (x.sum(1) > 0).long().split(32), strict=True))
    opt = SGDTracer(
        model.parameters(), lr=0.1, momentum=0.9, clip=Clip(norm=1.0), model=model, **({"rho": 0.003} | own)
    )

    def closure(x, y):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            outputs = model(x)
        return cross_entropy(outputs.float(), y)

    for i in [*range(0, len(batches), accumulate)] * 2:
        opt.step(closure, batches=batches[i : i + accumulate])
    return model


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("precision", "dtype"), [("no", None), ("bf16", torch.bfloat16)])
def test_accelerate(accelerate, accumulate, precision, dtype, capsys):
    """The weights of the same loop without Accelerate, and where nothing is accumulated its running statistics."""
    found = accelerate.main(epochs=2, shuffle=False, accumulate=accumulate, precision=precision)
    assert "trace_ratio" in capsys.readouterr().out
    expected = without_accelerate(accumulate, dtype)
    torch.testing.assert_close(weights(found), weights(expected), rtol=0, atol=1e-5)
    assert (weights(expected) - weights(without_accelerate(accumulate, dtype, rho=0.0))).abs().max() > 1e-3
    if accumulate == 1:
        torch.testing.assert_close(dict(found.named_buffers()), dict(expected.named_buffers()), rtol=0, atol=1e-5)


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


def test_timm_s_own_scaler():
    """Its script's lines, the flag included, with a net of its own."""
    timm = pytest.importorskip("timm")
    from timm.utils import NativeScaler

    module = example("timm_style")
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=2)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    penalty, scale = TracerPenalty(model.parameters(), rho=1e-3, delta=1e-2), NativeScaler("cpu")
    options = {"rho": 1e-3, "delta": 1e-2, "engine": "exact", "clip": Clip(norm=1.0)}
    opt = SGDTracer(twin.parameters(), lr=0.05, momentum=0.9, model=twin, **options)
    for x, y in module.batches(4):
        second_order = hasattr(optimizer, "is_second_order") and optimizer.is_second_order
        optimizer.zero_grad()
        loss = penalty(cross_entropy(model(x), y))
        scale(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), create_graph=second_order)
        opt.step(lambda x, y: cross_entropy(twin(x), y), x, y)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)


def test_scripts_in_timm_s_style_make_no_graph_for_us():
    """They ask the optimiser for this flag; passes at displaced weights want first-order gradients."""
    assert not hasattr(SGDTracer([torch.nn.Parameter(torch.ones(1))]), "is_second_order")


def test_a_step_that_could_be_captured_is_a_step():
    """The learning rate in a tensor and the batch copied, against the plain loop."""
    module = example("captured_step")
    losses = module.train("cpu", 12, captured=False)
    model = module.network()
    opt = SGDTracer(model.parameters(), lr=0.1, momentum=0.9, rho=1e-3, model=model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 12)
    expected = []
    for x, y in module.batches(12):
        expected.append(opt.step(lambda x, y: cross_entropy(model(x), y), x, y).item())
        schedule.step()
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_step_is_a_step():
    module = example("captured_step")
    assert module.train("cuda", 12) == pytest.approx(module.train("cuda", 12, captured=False), rel=1e-4)


# Lightning: what its loops compute is compared in test_lightning.py.


@pytest.mark.parametrize("kind", ["Automatic", "Manual"])
def test_lightning(kind):
    """The trajectory of the plain loop; T is in the log."""
    pytest.importorskip("lightning")
    module = example("lightning_module")
    trainer = module.main(getattr(module, kind))
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    model = module.Automatic()
    opt = model.configure_optimizers()
    for a, b in [*zip(x.split(32), (x.sum(1) > 0).long().split(32), strict=True)] * 2:
        loss = opt.step(model.loss_of, a, b)
    torch.testing.assert_close(weights(trainer.lightning_module), weights(model), rtol=0, atol=1e-6)
    assert trainer.callback_metrics["tracer/loss"].item() == pytest.approx(loss.item(), abs=1e-6)
    assert trainer.callback_metrics["tracer/trace_ratio"].item() == pytest.approx(opt.stats.trace_ratio, rel=1e-4)
    assert trainer.callback_metrics["tracer/penalty_ratio"] > 0
