"""Pages that lie outside of docs/, links that leave it, and versions."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
OUTSIDE = {"development/contributing.md": "CONTRIBUTING.md", "development/changes.md": "CHANGELOG.md"}
ROW, ERROR = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"(?<=\d) ± (?=\d)")
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
CODE, OPTION = re.compile(r"<code>[^<]*</code>"), re.compile(r"(?<![\w-])--[\w-]+")


def on_config(config: Any) -> Any:
    """The menu of versions asks for a list of them, which is there only where mike has put it."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    if config.extra["repository"]:
        config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": config.extra["repository"]}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Pages of the repository's root, with links as seen from where the site has them."""
    for place, name in OUTSIDE.items():
        text = LINK.sub(lambda m, at=place: _moved(m, at), (ROOT / name).read_text())
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """Links to what is not in the site: examples are shown on the page, the rest is in the repository.

    Pages for developers come last in a search.
    """
    folder = (ROOT / "docs" / page.file.src_uri).parent
    if page.file.src_uri.startswith("development/"):
        page.meta["search"] = {"boost": 0.1}  # the log has every word, and few look for it
    shown: list[str] = []

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found.groups()
        path = Path(os.path.normpath(folder / target))
        if path.is_relative_to(ROOT / "docs"):
            return found[0]
        name = path.relative_to(ROOT).as_posix()
        if name in OUTSIDE.values():
            (place,) = (place for place, outside in OUTSIDE.items() if outside == name)
            return f"[{text}]({os.path.relpath(ROOT / 'docs' / place, folder)}{anchor or ''})"
        if name.startswith("examples/"):
            shown.append(name)
            return f"[{text}](#{_slug(name)})"
        if config.extra["repository"]:
            return f"[{text}]({config.extra['repository'].rstrip('/')}/blob/main/{name})"
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"

    markdown = LINK.sub(link, markdown)
    markdown = ROW.sub(lambda row: ERROR.sub("\u00a0±\u00a0", row[0]), markdown)  # a number and its error on one line
    for name in dict.fromkeys(shown):
        markdown += f"\n\n## {name} {{ #{_slug(name)} }}\n\n```python\n{(ROOT / name).read_text()}```\n"
    return markdown


def on_page_content(html: str, **_: object) -> str:
    """Options of the command line are not broken after their dashes."""
    return CODE.sub(lambda code: OPTION.sub(r'<span class="option">\g<0></span>', code[0]), html)


def _moved(link: re.Match[str], place: str) -> str:
    """A link of a page at the root, as seen from its place in the site."""
    text, target, anchor = link.groups()
    seen = os.path.relpath(ROOT / target, (ROOT / "docs" / place).parent)
    return f"[{text}]({seen}{anchor or ''})"


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)
