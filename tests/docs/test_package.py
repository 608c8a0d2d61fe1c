"""Wheel and sdist: built, installed into an environment of their own, and used there, away from the source."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from gtracer import __version__

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def run(*words, folder, check=True):
    """Without the variables and the folder through which the source could be imported."""
    rest = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}
    return subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env=rest | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=check,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the sdist, and of the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, folder=folder)
    return folder


@pytest.fixture
def environment(tmp_path):
    """An empty environment; `lend` gives it this one's packages, but none that is installed in place."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    return home


def pip(environment, *words):
    return run(environment / "bin" / "pip", *words, folder=environment)


def install(environment, wheel):
    pip(environment, "install", "--no-deps", "--no-index", wheel)


def lend(environment):
    # After pip, which else would take this environment's gtracer for one that is there already. Such a line adds a
    # folder to the path, and does not read the .pth files in it, through which the source is installed in place.
    (packages,) = environment.glob("lib/python*/site-packages")
    names = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "lent.pth").write_text("\n".join(sorted(names)) + "\n")


def wheel_of(built):
    (wheel,) = built.glob("*.whl")
    return wheel


def test_the_version_is_in_both_names(built):
    assert {path.name for path in built.iterdir()} == {
        f"gtracer_optim-{__version__}-py3-none-any.whl",
        f"gtracer_optim-{__version__}.tar.gz",
    }


def test_the_wheel_holds_all_of_the_package_and_nothing_else(built):
    listed = run("git", "ls-files", "src/gtracer", folder=ROOT).stdout.split()
    source = {name.removeprefix("src/") for name in listed}
    held = {name for name in zipfile.ZipFile(wheel_of(built)).namelist() if ".dist-info/" not in name}
    assert held == source


def test_the_sdist_holds_what_a_packager_needs(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        held = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    wanted = ["pyproject.toml", "LICENSE", "README.md", "CITATION.cff", "CONTRIBUTING.md", "tests/conftest.py"]
    assert held >= set(wanted)


def test_the_demo_runs_from_the_wheel(built, environment, tmp_path):
    install(environment, wheel_of(built))
    lend(environment)
    here = tmp_path / "elsewhere"
    here.mkdir()
    code = "import gtracer, importlib.metadata as m; print(gtracer.__file__); print(m.version('gtracer-optim'))"
    file, version = run(environment / "bin" / "python", "-c", code, folder=here).stdout.splitlines()
    assert Path(file).is_relative_to(environment)
    assert version == __version__
    assert run(environment / "bin" / "gtracer", "--version", folder=here).stdout.strip() == f"gtracer {__version__}"

    shown = run(environment / "bin" / "gtracer", "demo", "--seeds", "1", "--epochs", "2", folder=here).stdout
    for name in ("SGD", "SAM, usual ρ", "SAM, tuned ρ", "SGD-TRACER"):
        rows = re.findall(rf"^│ {name} +│ 1((?:│ +\d+\.\d)+)│$", shown, flags=re.MULTILINE)
        assert [row.count("│") for row in rows] == [3, 3], shown  # with 2 layers and with 5: last, best, memorised
    assert (here / "runs" / "demo" / "report" / "index.html").exists()
    assert len(list((here / "runs" / "demo").glob("*/record.json"))) == 8


def stranger(folder):
    """A distribution named gtracer with a module named gtracer, as the one on PyPI is."""
    wheel, about = folder / "gtracer-0.2.2-py3-none-any.whl", "gtracer-0.2.2.dist-info"
    files = {
        "gtracer/__init__.py": "STRANGER = True\n",
        f"{about}/METADATA": "Metadata-Version: 2.1\nName: gtracer\nVersion: 0.2.2\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{about}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def test_beside_the_other_gtracer_it_is_as_the_readme_says(built, environment, tmp_path):
    def imports():
        code = "import gtracer; print(hasattr(gtracer, 'STRANGER'), hasattr(gtracer, '__version__'))"
        return run(environment / "bin" / "python", "-c", code, folder=tmp_path).stdout.split()

    install(environment, wheel_of(built))
    assert imports() == ["False", "True"]
    install(environment, stranger(tmp_path))
    assert imports() == ["True", "False"]  # the later one has overwritten __init__.py
    pip(environment, "uninstall", "--yes", "gtracer")
    assert imports() == ["False", "False"]  # no __init__.py is left
    pip(environment, "uninstall", "--yes", "gtracer-optim")
    install(environment, wheel_of(built))
    assert imports() == ["False", "True"]
