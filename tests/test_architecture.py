"""The rooms of docs/development/architecture.md: imports point downwards; `import gtracer` needs torch alone."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gtracer
from support.places import ROOT, TESTS

SOURCE = Path(gtracer.__file__).parent
# From the ground up. A room may import from the rooms before it.
ROOMS = [
    "tensors",
    "checks",
    "scopes",
    "curvature",
    "variational",
    "calibration",
    "penalty",
    "sharpness",
    "optim",
    "experimental",
    "presets",
    "finder",
    "integrations",
    "lab",
    "cli",
    "__main__",
]
FILES = sorted(SOURCE.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """The rooms of gtracer that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = node.module == "gtracer"
            names = [f"gtracer.{a.name}" for a in node.names if a.name != "__version__"] if whole else [node.module]
        found |= {name.split(".")[1] for name in names if name.startswith("gtracer.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_downwards(path):
    if path == SOURCE / "__init__.py":
        assert imports(path) <= set(ROOMS[: ROOMS.index("lab")])
    else:
        assert room(path) in ROOMS, f"{room(path)} is not in the picture"
        assert imports(path) <= set(ROOMS[: ROOMS.index(room(path)) + 1])


def test_tests_mirror_the_source():
    """A folder of tests is one of the source. No test module imports another: what they share is in tests/support."""
    for path in TESTS.rglob("test_*.py"):
        folder = path.parent.relative_to(TESTS)
        assert folder.parts[:1] in (("docs",), ("gpu",)) or (SOURCE / folder).is_dir(), path
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if name.rpartition(".")[2].startswith("test_")], path


def test_every_room_is_in_the_picture():
    picture = (ROOT / "docs" / "development" / "architecture.md").read_text()
    for name in ROOMS:
        if name != "__main__":
            assert f"\n{name}" in picture, f"docs/development/architecture.md does not show {name}"


def test_import_needs_torch_alone():
    """No extra, and not the lab, is loaded by `import gtracer`."""
    extras = ("sklearn", "rich", "transformers", "torchmetrics")
    code = f"import sys, gtracer, gtracer.calibration; print([m for m in sys.modules if m.split('.')[0] in {extras}"
    code += " or m.startswith('gtracer.lab')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def functions_of_a_step(make, steps=1):
    """Those of ours that a step runs after so many others, above the algebra of tensors and the checks of arguments."""
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3))
    x, y, seen = torch.randn(8, 5), torch.randint(3, (8,)), set()
    opt = make(model)

    def note(frame, event, _):
        # Comprehensions are functions to this Python, and not to a reader.
        if event == "call" and frame.f_code.co_name[-5:] not in ("comp>", "expr>"):
            seen.add(frame.f_code)

    def closure():
        return nn.functional.cross_entropy(model(x), y)

    for _ in range(steps):
        opt.step(closure)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        opt.step(closure)
    finally:
        sys.setprofile(before)
    ours = [(Path(code.co_filename), code.co_qualname) for code in seen if code.co_filename.startswith(str(SOURCE))]
    found = [(str(path.relative_to(SOURCE)), name) for path, name in ours]
    assert found  # else nothing was looked at
    return [(file, name) for file, name in found if file not in ("tensors.py", "checks.py")]


OPTIMIZERS = {
    "SGDTracer": lambda m, **own: gtracer.SGDTracer(m.parameters(), **own),
    "AdamTracer": lambda m, **own: gtracer.AdamTracer(m.parameters(), **own),
    "AdamWTracer": lambda m, **own: gtracer.AdamWTracer(m.parameters(), **own),
    "Tracer": lambda m, **own: gtracer.Tracer(torch.optim.RMSprop(m.parameters()), **own),
    "SAM": lambda m, **own: gtracer.SAM(torch.optim.SGD(m.parameters()), **own),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("given", [False, True], ids=["defaults", "a number for rho, and a model"])
def test_a_step_is_short(name, given):
    """What a reader has to follow; ρ has begun to rise by the 25th step, and moves in every tenth."""
    found = functions_of_a_step(lambda m: OPTIMIZERS[name](m, **({"rho": 0.003, "model": m} if given else {})), 25)
    assert len(found) <= 60, sorted(found)
    assert len({file for file, _ in found}) <= 9


def test_the_path_of_a_step_in_the_docs_is_the_codes():
    """Every function that docs/development/architecture.md names in it is run, by a plain step of SGDTracer."""
    text = (ROOT / "docs" / "development" / "architecture.md").read_text()
    path = text.split("## One step", 1)[1].split("```")[1]
    named = set(re.findall(r"\b(?:\w+\.)?(\w+)\(", path))
    ran = {
        name.rpartition(".")[2]
        for _, name in functions_of_a_step(lambda m: OPTIMIZERS["SGDTracer"](m, lr=0.1, rho=0.003, model=m))
    }
    assert len(named) > 10
    # An attribute of the evaluator, and what a plain step has none of.
    assert named <= ran | {"first", "transform", "note"}
