"""The documentation as a site: built once, strictly, as ``make site`` builds it; then what it holds is looked at."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest
from docs.hooks.figures import with_figures
from markdown_it import MarkdownIt

import tailrace
from tailrace.cli.main import build_parser
from tests.docs.snippets import ROOT

DOCS = ROOT / "docs"
#: What is not for users to import: the rooms below ``tailrace``, and the program. ``tailrace.lake`` is a room and a
#: public module.
NOT_PUBLIC = re.compile(r"tailrace\.(__main__|act|base|cli|core|demo|faces|lake\.\w+|read|version|watch)\b")
#: What a browser fetches by itself when it shows a page. Links that a reader may follow are no part of it.
LOADED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*?\s(?:src|href)=\"?([^\"\s>]+)")
LINKED = re.compile(r"<a\b[^>]*?\shref=\"([^\"]*)\"")
IDS = re.compile(r"\sid=\"?([^\"\s>]+)")
FOREIGN = re.compile(r"(?:[a-z]+:)?//")
SHAPES = ("h1", "h2", "h3", "pre", "ul", "ol", "li", "table", "tr", "code")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site; a warning fails its build."""
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return directory


@pytest.fixture(scope="module")
def html(site: Path) -> dict[str, str]:
    """Every page's HTML, by its place."""
    return {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}


def lost_links(html: dict[str, str], site: Path) -> list[str]:
    """Links inside of the site that lead nowhere: no such file, or no such place in it."""
    places = {page: {unescape(each) for each in IDS.findall(text)} for page, text in html.items()}
    lost = []
    for page, text in html.items():
        for link in set(LINKED.findall(text)):
            target, _, anchor = unquote(unescape(link)).partition("#")
            if re.match(r"[a-z]+:|//", target):
                continue
            file = os.path.normpath(os.path.join(os.path.dirname(page), target)) if target else page
            file = os.path.normpath(os.path.join(file, "index.html")) if (site / file).is_dir() else file
            if not (site / file).is_file() or (anchor and anchor not in places.get(file, {anchor})):
                lost.append(f"{page}: {link}")
    return lost


def test_links_and_anchors_of_the_site_lead_somewhere(site: Path, html: dict[str, str]) -> None:
    pages = {page: text for page, text in html.items() if page != "404.html"}  # made for any place
    assert lost_links(pages, site) == []
    planted = {**pages, "index.html": '<a href="faq.html#no-such-place">x</a><a href="no-such-page.html">x</a>'}
    assert sorted(lost_links(planted, site))[-2:] == [
        "index.html: faq.html#no-such-place",
        "index.html: no-such-page.html",
    ]


def loaded_from_elsewhere(text: str) -> list[str]:
    return [address for address in LOADED.findall(text) if FOREIGN.match(address)]


def test_nothing_is_loaded_from_another_host(site: Path, html: dict[str, str]) -> None:
    assert {page: found for page, text in html.items() if (found := loaded_from_elsewhere(text))} == {}
    assert loaded_from_elsewhere('<link rel="preconnect" href="https://fonts.example" crossorigin>') != []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet
    for script in site.rglob("bundle.*.js"):
        assert not re.findall(r"https://(?:unpkg|api\.github|cdn)[\w.]*", script.read_text()), script


def public_names() -> Iterator[str]:
    modules = ["tailrace", *(each.name for each in pkgutil.walk_packages(tailrace.__path__, "tailrace."))]
    for name in modules:
        if not NOT_PUBLIC.match(name):
            yield from (f"{name}.{public}" for public in getattr(importlib.import_module(name), "__all__", ()))


def test_every_public_name_has_its_place_in_the_reference(html: dict[str, str]) -> None:
    places = {place for page, text in html.items() if "/api/" in page for place in IDS.findall(text)}
    names = list(public_names())
    assert len(names) > 100
    assert [name for name in names if name not in places] == []


OWN_TABLE = re.compile(r"(?m)^``[\w*]+``(, ``[\w*]+``)*  +\S")


def docstrings(name: str) -> Iterator[str]:
    """The anchors of a public name, and of the public names in it."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    for each in (found, *(vars(found).values() if isinstance(found, type) else ())):
        text = getattr(getattr(each, "__func__", each), "__doc__", None)
        yield inspect.cleandoc(text) if isinstance(text, str) else ""


def test_docstrings_of_public_names_have_the_layout_that_tools_read() -> None:
    assert [name for name in public_names() if any(OWN_TABLE.search(text) for text in docstrings(name))] == []
    assert OWN_TABLE.search("Sentence.\n\n``name``  what it means") is not None


def commands(parser: argparse.ArgumentParser, prefix: str = "") -> Iterator[tuple[str, str, argparse.Action]]:
    """Each argument of each command: the command's page, what its anchor begins with, and itself."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for part in action.choices.values():
                yield from commands(part, prefix if parser.prog == "tailrace" else f"{prefix}{part.prog.split()[-1]}")
        elif parser.prog != "tailrace":
            yield parser.prog.split()[1], prefix, action


def test_every_option_is_in_the_reference_of_commands_with_its_default(html: dict[str, str]) -> None:
    found = [each for each in commands(build_parser()) if each[2].option_strings]
    assert len(found) > 150
    for command, prefix, action in found:
        text = html[f"reference/commands/{command}.html"]
        definition = re.search(rf'<dt id="?{prefix}{action.option_strings[-1]}"?>(.*?)</dd>', text, re.DOTALL)
        assert definition, f"{command}: {action.option_strings}"
        said = re.sub(r"<[^>]+>", "", unescape(definition[1]))
        assert all(option in said for option in action.option_strings), said
        if isinstance(action.default, (int, float)) and not isinstance(action.default, bool):
            assert "default" in said, f"{command}: the page hides the default of {action.option_strings}"


def shapes(html: str) -> dict[str, int]:
    return {tag: len(re.findall(rf"<{tag}[ >]", html)) for tag in SHAPES}


def test_a_page_has_on_the_site_the_shape_that_it_has_as_a_file(html: dict[str, str]) -> None:
    """The site's Markdown wants four spaces where other renderers are content with two: otherwise a list or a table
    falls apart."""
    reader = MarkdownIt("commonmark").enable("table")
    for path in sorted(DOCS.rglob("*.md")):
        text = html[str(path.relative_to(DOCS).with_suffix(".html"))]
        article = text[text.index("<article") : text.index("</article>")]
        assert shapes(re.sub(r"(?s)<nav.*?</nav>", "", article)) == shapes(reader.render(path.read_text())), path


def test_bars_are_drawn_of_the_figures_in_the_tables_above_them(html: dict[str, str]) -> None:
    marked = {path: len(re.findall(r"(?m)^<!-- bars: ", path.read_text())) for path in DOCS.rglob("*.md")}
    assert sum(marked.values()) >= 5
    for path, count in marked.items():
        drawn = re.findall(
            r"(?s)<svg class=\"figure\".*?</svg>", html[str(path.relative_to(DOCS).with_suffix(".html"))]
        )
        assert len(drawn) == count, path
        assert all(svg.count('<rect class="bar"') >= 2 for svg in drawn), path
    table = "| x | a | b |\n|---|---|---|\n| one | 1,500 (3) | |\n| two | 3 | 0.5 s |\n| three | 1, 2 | |\n"
    svg = with_figures(f"{table}\n<!-- bars: seconds; 2 first; 3 second -->\n")
    assert re.findall(r'width="([\d.]+)" height="11"', svg) == ["420.0", "1.0", "1.0"]
    assert all(f">{said}</text>" in svg for said in ("1,500", "3", "0.5"))
    with pytest.raises(AssertionError, match="no figure in any column"):
        with_figures(f"{table}\n<!-- bars: nothing; 1 names -->\n")


def test_the_search_knows_every_page(site: Path, html: dict[str, str]) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert [page for page in html if page != "404.html" and f'"location":"{page}"' not in index] == []
