"""The documentation site and the pages on GitHub: one navigation with every page, and links that lead somewhere on both.

`make site` builds it; what needs mkdocs is held there, by --strict.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.ranks import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
PAGES = sorted(DOCS.glob("*.md"))


class _Loader(yaml.SafeLoader):
    """Reads the file without making the Python objects that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def read_config() -> dict[str, Any]:
    config: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # a safe loader
    return config


def list_pages(nav: Any) -> Iterator[str]:
    """The pages of a navigation, in their order."""
    if isinstance(nav, str):
        yield nav
        return
    for entry in nav.values() if isinstance(nav, dict) else nav:
        yield from list_pages(entry)


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    made: set[str] = set()
    for heading in re.findall(
        r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE
    ):
        plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")
        made.add(plain)
    return made


def test_every_page_stands_once_in_the_navigation() -> None:
    listed = list(list_pages(read_config()["nav"]))
    assert sorted(listed) == [page.name for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for groups in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = "".join(groups)
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_file() and file.is_relative_to(ROOT), f"{page.name}: {target}"
        if anchor:
            assert anchor in slugs(file), f"{page.name}: {target}: {sorted(slugs(file))}"


def test_the_front_page_has_three_commands_and_a_picture() -> None:
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    commands = FENCE.findall(text)[0].splitlines()[1:-1]
    assert len(commands) == 3 and "![" in text
