"""Links between documents as they lie in the repository, turned into links between pages of the site."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_DOCS = "docs/"
#: The target of a link, without what follows a ``#``.
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)(?P<target>[^)#\s]+)(?=[)#\s])")


class RootLinks:
    """Rewrites links. ``places``: for each file outside of docs/ (from the root), the page that stands for it."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = dict(places)
        self._sources = {place: name for name, place in places.items()}

    def rewritten(self, markdown: str, page: str) -> str:
        """``markdown`` of ``page``, a place on the site, with its links leading to pages."""
        source = self._sources.get(page, _DOCS + page)

        def replace(match: re.Match[str]) -> str:
            name = os.path.normpath(os.path.join(os.path.dirname(source), match["target"]))
            if name.startswith(_DOCS):
                place = name.removeprefix(_DOCS)
            elif name in self._places:
                place = self._places[name]
            else:
                return match[0]
            return os.path.relpath(place, os.path.dirname(page) or ".")

        return _LINK.sub(replace, markdown)


def linked_files(docs: Path, documents: Iterable[str]) -> set[Path]:
    """The files outside of docs/ that its pages and the root's documents link to, those documents left out."""
    pages = [*docs.rglob("*.md"), *(ROOT / name for name in documents if name.endswith(".md"))]
    found = {(page.parent / match["target"]).resolve() for page in pages for match in _LINK.finditer(page.read_text())}
    left_out = {ROOT / name for name in documents}
    return {path for path in found if path.is_file() and docs not in path.parents and path not in left_out}
