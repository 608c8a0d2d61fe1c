"""The signature is the documentation: every argument is in it with its type, wrong ones are named, old ones work."""

import inspect
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import gtracer
from gtracer import SAM, AdamTracer, AdamWTracer, Clip, Exact, FiniteDifference, SGDTracer, Tracer
from gtracer.experimental import PartialBatch, Precondition, PreviousStep, Ridge

CLASSES = [SGDTracer, AdamTracer, AdamWTracer, Tracer, SAM]


def made(cls, model=None, **own):
    model = model or nn.Linear(2, 1)
    wraps = cls in (Tracer, SAM)
    return cls(torch.optim.SGD(model.parameters(), lr=0.1) if wraps else model.parameters(), **own)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_argument_has_a_name_a_type_and_a_line(cls):
    parameters = [p for name, p in inspect.signature(cls.__init__).parameters.items() if name != "self"]
    assert all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
    assert all(p.annotation is not inspect.Parameter.empty for p in parameters)
    lines = re.findall(r"^ {4,8}([\w, ]+): ", inspect.getdoc(cls) or "", re.MULTILINE)
    told = {name for line in lines for name in line.split(", ")}
    assert {p.name for p in parameters} <= told
    assert "{" not in cls.__doc__.replace("{rho", "")


@pytest.mark.parametrize("cls", CLASSES)
def test_they_are_siblings(cls):
    ours = [c for c in cls.__mro__ if c.__module__.startswith("gtracer")]
    assert ours == [cls, gtracer.optim.TwoPassOptimizer]
    assert "def step" not in inspect.getsource(cls)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_misspelt_argument(cls):
    with pytest.raises(TypeError, match=f"{cls.__name__} has no argument 'roh': did you mean rho"):
        made(cls, roh=1)
    with pytest.raises(TypeError, match="has no argument 'colour'; it takes "):
        made(cls, colour=1)


@pytest.mark.parametrize(
    ("written", "meant"),
    {
        "RHO": "rho",
        "rh0": "rho",
        "detla": "delta",
        "modle": "model",
        "f_0": "f0",
        "scalefree": "scale_free",
        "heldout": "held_out",
        "learning_rate": "lr",
        "wd": "weight_decay",
        "WeightDecay": "weight_decay",
        "implementaton": "implementation",
    }.items(),
)
def test_what_was_meant(written, meant):
    with pytest.raises(TypeError, match=f"has no argument '{written}': did you mean {meant}"):
        made(SGDTracer, **{written: 1})


@pytest.mark.parametrize("rho", [0.01, "auto"])
def test_why_there_are_no_kernels_on_a_cpu(rho):
    """A ρ that begins at 0 is not why."""
    assert made(SGDTracer, rho=rho).implementation_used.startswith("foreach, not fused: ")
    assert "ρ = 0" not in made(SGDTracer, rho=rho).implementation_used
    assert made(SGDTracer, rho=rho, implementation="foreach").implementation_used == "foreach"


def test_repr_names_what_matters():
    model = nn.Linear(2, 1)
    opt = SGDTracer(model.parameters(), lr=0.1, rho=0.25, beta=0.5, interval=4, engine=FiniteDifference(0.02))
    for part in ("SGDTracer(SGD", "rho=0.25", "beta=0.5", "delta=0.01", "FiniteDifference(radius=0.02", "interval=4"):
        assert part in repr(opt)
    assert "implementation='auto'" in repr(opt)
    for rho, shown in ((0.003, "0.003"), ("auto", "'auto' (now 0)")):
        groups = [{"params": [model.weight], "rho": 0.1}, {"params": [model.bias]}]  # torch fills them in
        assert f"rho=[0.1, {shown}]" in repr(AdamWTracer(groups, rho=rho))
    assert repr(made(SAM, rho=0.3)).startswith("SAM(SGD, rho=0.3, interval=1")
    assert "gtracer_rho" not in repr(Tracer(torch.optim.Adadelta(model.parameters())))


def test_a_model_that_has_none_of_the_parameters():
    with pytest.raises(ValueError, match="model = Linear holds none of the optimiser's parameters"):
        SGDTracer(nn.Linear(2, 1).parameters(), model=nn.Linear(2, 1))


OLD = [
    ({"compiled": True}, {"implementation": "compiled"}, "implementation='compiled'"),
    ({"lean": True}, {"implementation": "compiled"}, "implementation='compiled'"),
    ({"compiled": True, "lean": True}, {"implementation": "auto"}, "implementation='auto'"),
    ({"radius": 0.2}, {"engine": FiniteDifference(0.2)}, "engine=FiniteDifference(radius=0.2, central=False)"),
    ({"difference": "central"}, {"engine": FiniteDifference(central=True)}, "central=True"),
    ({"engine": "exact", "radius": 0.2}, {"engine": Exact()}, "engine='exact' alone"),
    ({"share": 0.5, "engine": FiniteDifference(0.2)}, {"engine": PartialBatch(0.5, 0.2)}, "experimental.PartialBatch"),
    ({"reuse": "previous"}, {"reuse": PreviousStep()}, "experimental.PreviousStep()"),
    ({"eta": 2.0}, {"transforms": (Ridge(2.0),)}, "experimental.Ridge(eta=2.0)"),
    ({"preconditioned": True}, {"transforms": (Precondition(),)}, "experimental.Precondition()"),
]


@pytest.mark.parametrize(("old", "new", "told"), OLD, ids=str)
def test_old_keywords_work_once_more_and_name_the_new_one(old, new, told):
    sentence = f"({'|'.join(old)})=.* will be removed in the next version: use .*{re.escape(told)}"
    with pytest.warns(DeprecationWarning, match=sentence) as caught:
        opt = SGDTracer([nn.Parameter(torch.ones(2))], **old)
    assert {w.filename for w in caught} == {__file__}
    found = {"engine": opt.method.engine, "transforms": opt.transforms, "reuse": opt.reuse}
    found["implementation"] = opt.implementation
    assert new.items() <= found.items()


def test_old_keywords_that_change_nothing():
    sentence = "^compiled=False or lean=False will be removed in the next version: use neither$"
    with pytest.warns(DeprecationWarning, match=sentence):
        assert SGDTracer([nn.Parameter(torch.ones(2))], compiled=False).implementation == "auto"


def test_the_old_second_moment():
    with pytest.warns(DeprecationWarning, match="loss_gradient"):
        assert not AdamWTracer([nn.Parameter(torch.ones(2))], second_moment="loss").rule.of_total
    with pytest.warns(DeprecationWarning, match="default"):
        assert AdamWTracer([nn.Parameter(torch.ones(2))], second_moment="total").rule.of_total
    with pytest.raises(ValueError, match="second_moment must be one of"):
        AdamWTracer([nn.Parameter(torch.ones(2))], second_moment="both")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("old", "message"),
    [
        ({"radius": -1.0}, "radius"),
        ({"difference": "backward"}, "difference must be one of"),
        ({"lean": "yes"}, "lean must be True or False"),
        ({"share": 2.0}, "share"),
        ({"share": 0.5, "engine": "exact"}, "engine='exact'"),
        ({"eta": 0.0}, "eta"),
        ({"preconditioned": 1}, "preconditioned must be"),
    ],
    ids=str,
)
def test_old_keywords_are_checked_as_ever(old, message):
    with pytest.raises(ValueError, match=message):
        SGDTracer([nn.Parameter(torch.ones(2))], **old)


def test_what_sam_never_had_is_not_old():
    with pytest.raises(TypeError, match="SAM has no argument 'compiled'"):
        made(SAM, compiled=True)


CALLS = """
import torch
from gtracer import SAM, AdamTracer, AdamWTracer, Clip, FiniteDifference, SGDTracer, Tracer
params = [torch.nn.Parameter(torch.ones(2))]
base = torch.optim.SGD(params)
SGDTracer(params, lr=0.1, rho=0.003, engine=FiniteDifference(0.02), clip=Clip(norm=1.0), model=torch.nn.Linear(2, 1))
AdamWTracer(params, betas=(0.9, 0.99), engine="exact", reuse=0.5, interval=2)
Tracer(base, beta=0.2, transforms=[])
SAM(base, rho=0.05, adaptive=True)
"""
WRONG = [
    "AdamWTracer(params, roh=1)",
    "AdamWTracer(params, rho='large')",
    "SGDTracer(params, interval=1.5)",
    "SGDTracer(params, 0.1, 0.9, 0.0, 0.0, False, True)",
    "Tracer(params)",
    "Tracer(base, momentum=0.9)",
    "AdamTracer(params, betas=0.9)",
    "SAM(base, beta=0.1)",
    "SGDTracer(params, clip=1.0)",
    "FiniteDifference('wide')",
]


def test_a_type_checker_sees_wrong_calls(tmp_path):
    """And none in right ones."""
    path = tmp_path / "calls.py"
    path.write_text(CALLS + "\n".join(WRONG) + "\n")
    command = [sys.executable, "-m", "mypy", "--no-incremental", "--follow-imports=silent", "--strict", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    first = len(CALLS.splitlines()) + 1
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == set(range(first, first + len(WRONG))), done.stdout


def test_help_is_readable(capsys):
    help(SGDTracer)
    printed = capsys.readouterr().out
    for line in ("rho: ρ, strength of the penalty", "interval: Number of steps", 'implementation: `"auto"`'):
        assert line in printed
    assert textwrap.dedent(SGDTracer.__doc__ or "").count("Args:") == 1
    assert Clip(norm=1.0).norm == 1.0


@pytest.mark.parametrize(
    ("cls", "base"),
    [(SGDTracer, torch.optim.SGD), (AdamTracer, torch.optim.Adam), (AdamWTracer, torch.optim.AdamW)],
)
def test_where_nothing_is_said_it_is_torchs(cls, base):
    """Every argument that both have has one default, in the signature and in the groups."""
    own, torchs = inspect.signature(cls).parameters, inspect.signature(base).parameters
    shared = own.keys() & torchs.keys()
    assert shared >= {"lr", "weight_decay", "maximize", "foreach"}
    assert {name: own[name].default for name in shared} == {name: torchs[name].default for name in shared}
    params = [nn.Parameter(torch.ones(1))]
    ours, theirs = cls(params).param_groups[0], base(params).param_groups[0]
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("cls", [SGDTracer, Tracer, AdamTracer, AdamWTracer])
def test_where_nothing_is_said_the_penalty_is_algorithm_1s(cls):
    """f₀ is the first F, ρ sets itself, the numbers are those of docs/explanation/algorithm.md."""
    opt = made(cls)
    hyper = opt.hyperparameters(opt.param_groups[0])
    beta = {} if "Adam" in cls.__name__ else {"beta": 0.1}  # Adam's is 1 − betas[1]
    assert hyper == {"rho": 0.0, "delta": 1e-2, "f0": "first-gradient"} | beta
    assert opt.sets_rho
    assert (opt.interval, opt.reuse, opt.clip, opt.nonfinite) == (1, None, None, "raise")
    penalty = gtracer.TracerPenalty([nn.Parameter(torch.ones(1))]).param_groups[0]
    assert {name: penalty[name] for name in ("rho", "beta", "delta", "f0")} == {
        "rho": 3e-3,
        "beta": 0.1,
        "delta": 1e-2,
        "f0": "first-gradient",
    }
