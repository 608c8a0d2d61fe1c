"""The documentation site: built without a warning, whole, and quiet in a browser."""

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock

import gtracer
from gtracer import cli
from support.browser import chromium
from support.places import ROOT

pytest.importorskip("material", reason="needs the docs extra: pip install 'gtracer-optim[docs]'")

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS) for path in DOCS.rglob("*.md"))
ROOMS = [f"gtracer.{room}" for room in gtracer.ROOMS]
SOURCE = Path(gtracer.__file__).parent
INTEGRATIONS = [f"gtracer.integrations.{host}" for host in ("transformers", "lightning", "accelerate")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built once for all processes that run tests of this file."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            made = folder.with_name("site-being-made")
            command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(made)]
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            assert "WARNING" not in done.stderr
            shutil.move(made, folder)
    return folder


class Page(HTMLParser):
    """What a page links to, loads, and can be linked to by."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], {"", "__top"}
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif "src" in found:
            self.loads.append(found["src"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(found["href"])


@pytest.fixture(scope="module")
def pages(site):
    """All but the page for what is not found, which knows only where the site will be."""
    return {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_every_page_is_there(site, pages):
    made = {path.relative_to(site).with_suffix(".md") for path in pages}
    assert made == {*PAGES, *(Path("development", f"{name}.md") for name in ("contributing", "changes"))}


def test_every_link_leads_somewhere(pages):
    """Anchors too."""
    broken = []
    for path, page in pages.items():
        for target in page.links + page.loads:
            to = urlsplit(target)
            if to.scheme:
                continue
            file = (path.parent / unquote(to.path)).resolve() if to.path else path
            if not file.is_file():
                broken.append(f"{path.name}: {target}")
            elif file in pages and unquote(to.fragment) not in pages[file].anchors:
                broken.append(f"{path.name}: {target} has no such anchor")
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for path, page in pages.items():
        assert not [target for target in page.loads if urlsplit(target).netloc], path
    for path in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*", path.read_text()), path


def public(room):
    """The names that a module says are public, or else its own functions and classes; none is imported."""
    file = SOURCE.joinpath(*room.split(".")[1:])
    tree = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    own = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [name for name in own if not name.startswith("_")]


@pytest.mark.parametrize("room", ["gtracer", *ROOMS, *INTEGRATIONS])
def test_every_public_name_is_described(pages, room):
    described = set().union(*(page.anchors for path, page in pages.items() if path.parent.name == "reference"))
    names = public(room) + (["load"] if room == "gtracer" else [])
    assert names
    assert [name for name in names if not {f"{room}.{name}", f"gtracer.{name}"} & described] == []


def test_defaults_are_shown_as_numbers(site):
    """Not by the names of the constants that hold them; a dataclass's too."""
    text = re.sub(r"<[^>]+>", "", (site / "reference" / "optimizers.html").read_text())
    assert "delta: float = 0.01," in text
    assert "radius: float = 0.05, central: bool = False" in text
    assert not re.findall(r"\b(?:AUTO|BETA|DELTA|RHO|RADIUS|FIRST_GRADIENT)\b", text)


@pytest.fixture(scope="module")
def hook():
    """A function: one of docs/hooks, as mkdocs has it."""
    pytest.importorskip("mkdocs")

    def load(name):
        spec = importlib.util.spec_from_file_location(name, DOCS / "hooks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(
    ("repository", "shown"),
    [
        ("", "see `studies/step.py`, how (`LICENSE`)"),
        (
            "https://x.org/y",
            "see [studies/step.py](https://x.org/y/blob/main/studies/step.py), [how](https://x.org/y/blob/main/LICENSE)",
        ),
    ],
)
def test_links_out_of_the_docs_lead_to_the_repository_or_name_the_file(hook, repository, shown):
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/timm.md"))
    config = SimpleNamespace(extra={"repository": repository})
    text = "see [studies/step.py](../../studies/step.py), [how](../../LICENSE)"
    assert hook("pages").on_page_markdown(text, page=page, config=config) == shown
    kept = "[a](ddp.md), [b](https://x.org), [c](#d), ![e](../figures/step.svg)"
    assert hook("pages").on_page_markdown(kept, page=page, config=config) == kept
    made = hook("pages").on_page_markdown("[e](../../examples/timm_style.py)", page=page, config=config)
    assert made.startswith("[e](#examples-timm_style-py)\n")
    assert (ROOT / "examples" / "timm_style.py").read_text() in made


def test_a_number_and_its_error_stay_on_one_line(hook):
    """In tables; code is left as it is."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/timm.md"))
    config = SimpleNamespace(extra={"repository": ""})
    made = hook("pages").on_page_markdown("| 1.0 ± 0.2 | **3.0 ± 0.4** |\n\n    1.0 ± 0.2", page=page, config=config)
    assert made == "| 1.0\u00a0±\u00a00.2 | **3.0\u00a0±\u00a00.4** |\n\n    1.0 ± 0.2"


def test_an_option_is_not_broken(hook):
    """In code within a line; nothing else is touched."""
    made = hook("pages").on_page_content("<p>--a</p> <code>x --label-noise 0.5</code> <code>a-b</code>")
    option = '<span class="option">--label-noise</span>'
    assert made == f"<p>--a</p> <code>x {option} 0.5</code> <code>a-b</code>"


@pytest.mark.parametrize("version", [None, "0.1"])
def test_the_menu_of_versions_is_there_where_mike_makes_it(hook, monkeypatch, version):
    """Elsewhere the browser would ask for a list that is not there."""
    monkeypatch.delenv("MIKE_DOCS_VERSION", raising=False)
    if version:
        monkeypatch.setenv("MIKE_DOCS_VERSION", version)
    config = hook("pages").on_config(SimpleNamespace(extra={"repository": ""}))
    assert config.extra.get("version") == ({"provider": "mike"} if version else None)


def commands(parser, path=("gtracer",)):
    yield path, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from commands(inner, (*path, name))


def test_every_command_and_option_is_described(site):
    text = (site / "reference" / "command-line.html").read_text()
    found = list(commands(cli.parser()))
    assert len(found) > 10
    for path, parser in found[1:]:
        assert f'id="{"-".join(path)}"' in text
        section = text.split(f'id="{"-".join(path)}"')[1].split("<h2")[0]
        for action in parser._actions:
            for option in action.option_strings:
                assert option in section or option in ("-h", "--help"), (path, option)
    assert text.count("the options of gtracer train</summary>") == 3  # folded, for compare, tune and find-rho


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_begins_with_what_its_reader_can_do_after_it(page):
    title, first = (DOCS / page).read_text().split("\n", 1)
    assert title.startswith("# ")
    assert re.match(r"\s*After this page ", first)


def test_pages_for_developers_come_last_in_a_search(site):
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {section["location"].startswith("development/"): section.get("boost", 1) for section in index}
    assert found[True] < found[False] == 1


def test_the_log_is_for_developers():
    """The results point to it, for the history of a number; what else a user needs of it stands where it is needed."""
    linking = {page.parts[0] for page in PAGES if "log.md" in (DOCS / page).read_text()}
    assert linking == {"results"}


# In the browser


@pytest.fixture(scope="module")
def browser():
    with chromium() as running:
        yield running


@pytest.mark.parametrize(("scheme", "width"), [("dark", 390), ("light", 1280)])
def test_every_page_is_quiet_and_fits(browser, site, pages, scheme, width):
    """No word on the console, no error, no request that fails or leaves the folder, nothing wider than the screen."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    heard = []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    # One that is under way when the next page is opened is aborted, on a slow machine.
    failed = lambda request: "ABORTED" in (request.failure or "") or heard.append(f"failed: {request.url}")  # noqa: E731
    page.on("requestfailed", failed)
    page.on("request", lambda request: request.url.startswith(site.as_uri()) or heard.append(request.url))
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    colours = {"dark": "slate", "light": "default"}[scheme]
    for path in pages:
        page.goto(path.as_uri())
        assert page.evaluate(wider) <= 0, path
        assert page.locator("body").get_attribute("data-md-color-scheme") == colours, path
        assert heard == [], path
    context.close()


def test_formulas_search_and_copying(browser, site):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    page = context.new_page()
    page.goto((site / "explanation" / "algorithm.html").as_uri())
    page.locator("mjx-container").first.wait_for()
    assert page.locator("mjx-container").count() >= 8
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    assert page.evaluate("document.fonts.ready.then(() => document.fonts.check('16px MJXTEX-I'))")

    page.get_by_label("Switch to light mode").first.wait_for(state="attached")
    page.locator("label[title='Switch to light mode']").click()
    page.locator("label[title='Switch to dark mode']").click()
    assert page.locator("body").get_attribute("data-md-color-scheme") == "slate"

    page.get_by_placeholder("Search").fill("held_out_batches")
    found = page.locator(".md-search-result__link").first
    found.wait_for()
    assert "choosing-rho.html" in found.get_attribute("href")

    page.goto((site / "start" / "five-minutes.html").as_uri())
    assert page.locator("button.md-code__button[data-md-type=copy]").count() >= 4
    context.close()
