"""What a contributor and CI are told agrees with the code: CONTRIBUTING, workflows, hooks, citation."""

import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gtracer import __version__, cli

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10; pytest needs it there too
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
README = (ROOT / "README.md").read_text()
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
TORCH = Requirement(PROJECT["project"]["dependencies"][0])
PINS = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def commands(page):
    blocks = re.findall(r"^```sh\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    return [command.strip() for line in "".join(blocks).splitlines() if line for command in line.split("&&")]


INSTALL_AND_TEST = commands(README.split("<!-- install-and-test -->")[1])[:6]
CHECKS = INSTALL_AND_TEST[2:5]


def steps(workflow):
    return [step for job in WORKFLOWS[workflow]["jobs"].values() for step in job["steps"]]


def runs(workflow):
    return [step["run"] for step in steps(workflow) if "run" in step]


def matrix():
    return WORKFLOWS["tests"]["jobs"]["versions"]["strategy"]["matrix"]


# CONTRIBUTING


def test_set_up_and_test_are_the_readmes_command():
    environment, install, hooks, *test = commands(CONTRIBUTING)[:7]
    assert [environment, install, *test] == INSTALL_AND_TEST
    assert hooks == ".venv/bin/pre-commit install"


@pytest.mark.parametrize("command", commands(CONTRIBUTING))
def test_its_commands_exist(command):
    program, *words = shlex.split(command)
    program = program.removeprefix(".venv/bin/")
    if program == "gtracer":
        cli.parser().parse_args(words)
    elif program not in ("python", "python3", "pip"):
        assert program in {script.name for script in metadata.entry_points(group="console_scripts")} | {"ruff"}
    for word in words:
        if "/" in word and not word.startswith("runs/"):  # which is what they make
            assert (ROOT / word).exists(), word


def test_its_paths_exist():
    named = re.findall(r"`([\w.\-]*(?:/[\w.\-]*)+|\w+\.(?:md|toml|txt|cff))`", CONTRIBUTING)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", ".github/pull_request_template.md"])
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text()):
        assert (ROOT / target).exists(), target


def test_all_tools_are_installed_by_the_dev_extra():
    wanted = {Requirement(line).name for line in PROJECT["project"]["optional-dependencies"]["dev"]}
    assert wanted >= {"build", "hatchling", "mypy", "pre-commit", "pytest", "pytest-randomly", "pytest-xdist", "ruff"}


def test_what_the_extras_want_is_pinned_within_their_ranges():
    pins = {pin.name.lower().replace("_", "-"): pin for pin in PINS}
    lines = [line for extra in PROJECT["project"]["optional-dependencies"].values() for line in extra]
    for wanted in [TORCH, *map(Requirement, lines)]:
        if wanted.name != "gtracer-optim":
            (pin,) = pins[wanted.name.lower()].specifier
            assert pin.operator == "=="
            assert wanted.specifier.contains(pin.version), wanted


# Versions


def test_tests_run_on_every_python_that_is_promised():
    promised = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert matrix()["python"] == promised
    allowed = SpecifierSet(PROJECT["project"]["requires-python"])
    assert all(allowed.contains(version) for version in promised)
    lowest = int(promised[0].split(".")[1])
    assert not allowed.contains(f"3.{lowest - 1}")


def test_tests_run_on_the_lowest_torch_and_on_the_newest():
    (lowest,) = TORCH.specifier
    assert lowest.operator == ">="
    assert matrix()["torch"] == [f"torch=={lowest.version}.*", "torch"]
    assert f"torch {lowest.version})" in README


def test_every_job_runs_on_a_python_that_is_tested():
    for name in WORKFLOWS:
        for step in steps(name):
            if step.get("uses", "").startswith("actions/setup-python"):
                version = step["with"]["python-version"]
                assert version in [*matrix()["python"], "${{ matrix.python }}"]


# Workflows


@pytest.mark.parametrize("name", ["tests", "lint", "docs", "release"])
def test_workflows_have_no_more_rights_than_they_need(name):
    """And no secrets: releases are by trusted publishing."""
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    rights = {job: body["permissions"] for job, body in WORKFLOWS[name]["jobs"].items() if "permissions" in body}
    publishing = {"release": {"publish": {"id-token": "write"}}, "docs": {"publish": {"contents": "write"}}}
    assert rights == publishing.get(name, {})
    assert "secrets." not in (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    for body in WORKFLOWS[name]["jobs"].values():
        pushes = body.get("permissions") == {"contents": "write"}
        for step in body["steps"]:
            assert ("run" in step) != ("uses" in step)
            if step.get("uses", "").startswith("actions/checkout"):
                assert step["with"]["persist-credentials"] is pushes


def test_one_version_of_every_action():
    used = {step["uses"] for name in WORKFLOWS for step in steps(name) if "uses" in step}
    assert len({action.split("@")[0] for action in used}) == len(used)


def test_files_and_scripts_that_workflows_name_exist():
    for name in WORKFLOWS:
        for word in shlex.split(" ".join(runs(name))):
            if word.startswith(("tests/", ".ci/")):
                assert (ROOT / word).exists(), word


def test_lint_is_the_readmes():
    checks = [line for line in runs("lint") if line.startswith(("ruff", "mypy"))]
    assert checks == [check.removeprefix(".venv/bin/") for check in CHECKS]


def test_the_release_is_built_tested_and_published_by_the_name_that_is_trusted():
    jobs = WORKFLOWS["release"]["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["environment"]["name"] == "pypi"
    assert jobs["publish"]["environment"]["url"].rstrip("/").endswith(f"/{PROJECT['project']['name']}")
    assert any("-m slow tests/docs/test_package.py" in line for line in runs("release"))
    assert "the environment `pypi`" in CONTRIBUTING


# Hooks


def test_hooks_run_the_pinned_tools():
    """Those of .venv, with the README's words: there is no second version to keep equal."""
    (local,) = [repo for repo in HOOKS if repo["repo"] == "local"]
    assert [hook["entry"] for hook in local["hooks"]] == CHECKS
    assert not any("additional_dependencies" in hook for hook in local["hooks"])
    assert all("rev" in repo for repo in HOOKS if repo is not local)


def test_no_file_is_larger_than_the_hook_allows():
    hooks = {hook["id"]: hook for repo in HOOKS for hook in repo["hooks"]}
    limit = int(hooks["check-added-large-files"]["args"][0].removeprefix("--maxkb="))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    sizes = {name: (ROOT / name).stat().st_size for name in listed.split("\0") if (ROOT / name).is_file()}
    assert {name for name, size in sizes.items() if size > 1024 * limit} == set()
    assert f"above {limit} kB" in CONTRIBUTING


def test_random_order_is_there_when_asked_for(tmp_path):
    """Not by default: pytest-randomly also reseeds, and the tests' tolerances belong to their own seed."""
    (tmp_path / "test_nothing.py").write_text("def test_nothing(): pass\n")
    words = [sys.executable, "-m", "pytest", "-n0", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path)]
    for extra, expected in ([], False), (["-p", "randomly"], True):
        done = subprocess.run([*words, *extra, str(tmp_path)], capture_output=True, text=True, check=True, cwd=tmp_path)
        assert ("--randomly-seed=" in done.stdout) is expected


# Templates, Dependabot, citation


def test_forms_and_dependabot_parse():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form)
            assert len({field["id"] for field in form["body"]}) == len(form["body"])
            assert all(field["attributes"]["label"] for field in form["body"])
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())
    assert updates["version"] == 2
    assert [u["package-ecosystem"] for u in updates["updates"]] == ["github-actions", "pip", "pre-commit"]


def test_the_citation_is_complete():
    """The keys that the Citation File Format 1.2.0 requires, here and of the paper."""
    assert set(CITATION) >= {"cff-version", "message", "title", "authors"}
    assert CITATION["cff-version"] == "1.2.0"
    assert CITATION["version"] == __version__
    assert CITATION["license"] == PROJECT["project"]["license"]
    paper = CITATION["preferred-citation"]
    assert set(paper) >= {"type", "title", "authors"}
    assert paper["title"] in re.sub(r"\s+", " ", README)
    assert [a["family-names"] for a in paper["authors"]] == ["Williams", "Roberts"]
