"""On a CUDA device: float16 with loss scaling, nccl, and a step captured while LR and scale change.

Run with `pytest -m gpu`.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gtracer import AdamWTracer, Clip, FiniteDifference, SGDTracer
from gtracer.lab.models.transformer import Transformer
from support.data_parallel import OPTIMIZERS, agree, alone, batches, flat

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def convolutional():
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 16, 3, bias=False),  # before a norm a bias has no gradient but rounding, which Adam blows up
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    return nn.Sequential(*layers).cuda()


def test_float16_is_the_fp32_run_within_precision():
    start = convolutional()
    x, y = torch.randn(6, 32, 3, 16, 16, device="cuda"), torch.randint(10, (6, 32), device="cuda")
    found = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        model = copy.deepcopy(start)
        opt = SGDTracer(model.parameters(), lr=0.05, momentum=0.9, rho=0.003, delta=0.01, model=model)
        scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)

        def closure(inputs, labels, model=model, dtype=dtype):
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                return cross_entropy(model(inputs), labels)

        for inputs, labels in zip(x, y, strict=True):
            opt.step(closure, inputs, labels, scaler=scaler)
            scaler.update()
        found[dtype] = nn.utils.parameters_to_vector(model.parameters()).detach()
    moved = (found[torch.float32] - nn.utils.parameters_to_vector(start.parameters())).norm()
    assert (found[torch.float16] - found[torch.float32]).norm() < 0.05 * moved
    assert (found[torch.bfloat16] - found[torch.float32]).norm() < 0.2 * moved


def test_an_overflow_in_float16_skips_the_step():
    model = convolutional()
    opt = SGDTracer(model.parameters(), lr=0.05, rho=0.003, delta=0.01, model=model)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    x, y = torch.randn(8, 3, 16, 16, device="cuda"), torch.randint(10, (8,), device="cuda")
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()

    def closure():
        with torch.autocast("cuda", torch.float16):
            return cross_entropy(model(x), y)

    opt.step(closure, scaler=scaler)
    scaler.update()
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
    assert scaler.get_scale() == 2.0**39


@pytest.mark.parametrize("penalty", ["whole", "each"])
def test_one_process_with_nccl(tmp_path, penalty):
    """Two would need two GPUs; this much shows that the exchanges are nccl's."""
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double().cuda()
        wrapped = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
        opt = OPTIMIZERS["SGDTracer"](wrapped.parameters(), model=wrapped)
        for x, y in batches():
            opt.step(lambda x, y: cross_entropy(wrapped(x), y), x.cuda(), y.cuda(), penalty=penalty)
        found = flat(model.parameters()).cpu(), flat(opt.state[p]["f"] for p in model.parameters()).cpu()
    finally:
        distributed.destroy_process_group()
    agree([found], alone("SGDTracer"), tolerance=1e-7)


FUSED = {"implementation": "fused"}


@pytest.mark.parametrize(
    ("cls", "own", "dtype", "tolerance"),
    [
        (AdamWTracer, {"capturable": True}, torch.float64, 1e-9),
        (AdamWTracer, {"weight_decay": 0.1, "capturable": True, **FUSED}, torch.float32, 1e-4),
        (SGDTracer, {"momentum": 0.9, **FUSED}, torch.float32, 1e-4),
        (AdamWTracer, {"clip": Clip(norm=0.5), "capturable": True, **FUSED}, torch.float32, 1e-4),
        (AdamWTracer, {"rho": "auto", "capturable": True}, torch.float64, 1e-9),
        (SGDTracer, {"rho": "auto", "momentum": 0.9, **FUSED}, torch.float32, 1e-4),
    ],
    ids=str,
)
def test_a_captured_step(cls, own, dtype, tolerance, monkeypatch):
    """Counts its steps and reads its learning rate on the device: replays are the steps of an eager run."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # else two runs differ, captured or not
    x = torch.randn(8, 32, 3, 16, 16, device="cuda", dtype=dtype)
    y = torch.randint(10, (8, 32), device="cuda")
    tables, launches = [], pytest.importorskip("gtracer.optim.triton_kernels")
    monkeypatch.setattr(launches, "as_arguments", lambda *a, made=launches.as_arguments: tables.append(a) or made(*a))
    found, rhos = [], []
    for captured in (False, True):
        model = convolutional().to(dtype)
        lr = torch.tensor(1e-3, device="cuda")
        own = {"rho": 0.003} | own
        opt = cls(model.parameters(), lr=lr, delta=0.01, model=model, nonfinite="ignore", **own)
        if opt.sets_rho:  # so that it is another in every step
            opt.controller = replace(opt.controller, start=0.003, wait=1, rise=8, steps_per_epoch=4)
        opt.prepare_capture()
        inputs, labels = x[0].clone(), y[0].clone()

        def step(opt=opt, model=model, inputs=inputs, labels=labels):
            opt.step(lambda: cross_entropy(model(inputs), labels))

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                step()
        for i in range(1, 8):
            inputs.copy_(x[i])
            labels.copy_(y[i])
            lr.fill_(1e-3 * (1 - i / 10))
            graph.replay() if captured else step()
        found.append(flat(model.state_dict().values()))  # statistics too, which a capture saves nowhere
        rhos.append(opt.rho_of(opt.param_groups[0]))
    torch.testing.assert_close(*found, rtol=10 * tolerance, atol=tolerance)
    assert rhos[1] == pytest.approx(rhos[0], rel=1e-4)
    assert rhos[1] >= 0.0026
    assert len(tables) == (2 if "implementation" in own else 0)  # the fused step is what was captured


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.parametrize(("cls", "own"), [(SGDTracer, {}), (AdamWTracer, {"eps": 1e-3})], ids=["SGD", "AdamW"])
def test_a_compiled_update_of_an_encoder(cls, own):
    """Tensors of many shapes, on which torch 2.11's compiler fails if it may turn loops around."""
    x, y = torch.randint(1000, (4, 8, 32), device="cuda"), torch.randint(100, (4, 8), device="cuda")
    found = []
    for name in ("foreach", "compiled"):
        torch.manual_seed(0)
        model = Transformer(layers=12).cuda()
        opt = cls(
            model.parameters(),
            lr=1e-3,
            rho=0.003,
            delta=0.01,
            implementation=name,
            **own,
        )
        for words, labels in zip(x, y, strict=True):
            opt.step(lambda model=model, words=words, labels=labels: cross_entropy(model(words), labels))
        found.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


def test_flash_attention_in_the_finite_difference():
    """The penalised gradient is that of plain attention, within bfloat16's rounding."""

    def penalised(backend, rho):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).cuda()
        own = {"engine": FiniteDifference(0.2), "implementation": "foreach"}  # which leaves the gradient in .grad
        opt = SGDTracer(layer.parameters(), lr=0.0, rho=rho, delta=0.01, **own)
        x = torch.randn(4, 32, 64, device="cuda")

        def closure():
            with torch.autocast("cuda", torch.bfloat16), torch.nn.attention.sdpa_kernel(backend):
                return layer(x).float().square().mean()

        opt.step(closure)
        return torch.cat([p.grad.flatten() for p in layer.parameters()])

    backends = torch.nn.attention.SDPBackend
    flash, plain, unpenalised = (
        penalised(backends.FLASH_ATTENTION, 0.05),
        penalised(backends.MATH, 0.05),
        penalised(backends.MATH, 0.0),
    )
    assert (flash - plain).norm() < 0.2 * (plain - unpenalised).norm()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp16", 0.01), ("bf16", 0.05)])
def test_the_trainer_in_half_precision(tmp_path, precision, tolerance):
    """It makes the steps of a closure in float32, within precision; with SGD, since Adam blows small gradients up."""
    trainers = pytest.importorskip("support.trainers")
    options = {"lr": 0.1, "momentum": 0.9, "rho": 0.01, "delta": 0.05}
    model = trainers.bert()
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    words = {"optimizers": (SGDTracer(model.parameters(), **options), None)}
    found, made = trainers.trained(tmp_path, trainers.Watched, model, words, use_cpu=False, **{precision: True})
    assert (made.accelerator.scaler is not None) == (precision == "fp16")
    twin = trainers.bert().cuda().train()
    opt = SGDTracer(twin.parameters(), **options)
    for batch in made.seen:
        opt.step(lambda batch=batch: twin(**batch).loss)
    expected = nn.utils.parameters_to_vector(twin.parameters()).detach()
    assert (found - expected).norm() < tolerance * (expected - start.cuda()).norm()
