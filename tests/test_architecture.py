"""The rooms of docs/architecture.md: imports point downwards only, and `import gtracer` needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gtracer

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
    "optim",
    "experimental",
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


def test_every_room_is_in_the_picture():
    picture = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    for name in ROOMS:
        if name != "__main__":
            assert f"\n{name}" in picture, f"docs/architecture.md does not show {name}"


def test_import_needs_torch_alone():
    """No extra, and not the lab, is loaded by `import gtracer`."""
    extras = ("sklearn", "rich", "transformers", "torchmetrics")
    code = f"import sys, gtracer, gtracer.calibration; print([m for m in sys.modules if m.split('.')[0] in {extras}"
    code += " or m.startswith('gtracer.lab')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
