"""What MkDocs asks of us while it builds the site: pages that are made, not written, and links that lead out of docs/.

Pages are made of the root's documents (README, changes, ...), of examples and other files that a page links to, of the
parsers of the command line, and of the public modules.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import api_pages
import command_pages
from figures import with_figures
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from root_links import ROOT, RootLinks, linked_files

#: The root's documents, and their places on the site.
_DOCUMENTS = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "report-a-vulnerability.md",
    "LICENSE": "license.md",
}
#: Entries of the navigation that stand for pages which are made.
_COMMANDS, _API = "commands...", "api..."
#: Of a file's name, the language that its page is coloured as.
_LANGUAGES = {".py": "python", ".yaml": "yaml"}
_PAGE = re.compile(r"docs/(?P<place>[\w/-]+\.md)")
#: What the theme's script would fetch where a browser lacks it, or a page had a diagram: neither is so here.
_FOREIGN = re.compile(r"https://(?:unpkg\.com|api\.github\.com)/")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation with the pages that are made."""
    config.nav = _filled(config.nav)
    return config


def _filled(entry: Any) -> Any:
    if isinstance(entry, dict):
        return {title: _filled(part) for title, part in entry.items()}
    if not isinstance(entry, list):
        return entry
    filled = []
    for part in entry:
        if part == _COMMANDS:
            filled += [{title: path} for path, title in command_pages.titles().items()]
        elif part == _API:
            filled += [{title: path} for path, title in api_pages.titles().items()]
        else:
            filled.append(_filled(part))
    return filled


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    for name, path in _DOCUMENTS.items():
        text = (ROOT / name).read_text()
        files.append(File.generated(config, path, content=text if name.endswith(".md") else _listing(name, text)))
    for path, text in {**command_pages.pages(), **api_pages.pages()}.items():
        files.append(File.generated(config, path, content=text))
    shown = {}
    for linked in sorted(linked_files(Path(config.docs_dir), _DOCUMENTS)):
        name = str(linked.relative_to(ROOT))
        shown[name] = f"files/{name}.md"
        page = File.generated(config, shown[name], content=_listing(name, linked.read_text()))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    config.extra["root_links"] = RootLinks({**_DOCUMENTS, **shown})
    return files


def _listing(name: str, text: str) -> str:
    fence = "````"
    return f"# {name}\n\n{fence}{_LANGUAGES.get(Path(name).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links that lead out of docs/ into links to the pages that stand for their targets, and draw figures."""
    links: RootLinks = config.extra["root_links"]
    return with_figures(links.rewritten(markdown, page.file.src_uri))


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Docstrings name pages of the documentation as files: on the site, these are links."""
    if not page.file.src_uri.startswith("reference/api/"):
        return content

    def link(match: re.Match[str]) -> str:
        named = files.get_file_from_path(match["place"])
        assert named is not None, f"{page.file.src_uri} names {match[0]}, which is no page"
        return f'<a href="{named.url_relative_to(page.file)}">{match[0]}</a>'

    return _PAGE.sub(link, content)


def on_post_build(config: MkDocsConfig) -> None:
    """Leave no address in the theme's script that it could load something from."""
    for script in Path(config.site_dir, "assets", "javascripts").glob("bundle.*.js"):
        script.write_text(_FOREIGN.sub("about:blank#", script.read_text()))
