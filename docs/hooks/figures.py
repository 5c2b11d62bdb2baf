"""Bars for tables of figures: ``<!-- bars: TITLE; COLUMN NAME; ... -->`` after a table draws its columns on the site.

A column is named by its number, from 1 on, and by what its bars are called. The table stays the only place of the
figures; as a file the page shows the table alone.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

_MARK = re.compile(r"(?P<table>(?:^\|.*\n)+)\n?<!-- bars: (?P<what>[^>]+) -->\n", re.MULTILINE)
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_CELL = re.compile(r"(?<!\\)\|")
_WIDTH, _LABELS, _VALUES, _BAR, _GAP, _TOP = 790, 300, 70, 13, 9, 44
_COLOURS = ("#9aa5b1", "#00897b", "#5c6bc0")
_ONE_COLOUR = ("#00897b",)


def with_figures(markdown: str) -> str:
    """``markdown`` with an SVG in the place of each mark."""
    return _MARK.sub(lambda match: f"{match['table']}\n{_figure(match['table'], match['what'])}\n", markdown)


def _figure(table: str, what: str) -> str:
    title, *wanted = [part.strip() for part in what.split(";")]
    rows = [[cell.strip() for cell in _CELL.split(line.strip())[1:-1]] for line in table.splitlines()][2:]
    columns = [(int(number), name) for number, _, name in (each.partition(" ") for each in wanted)]
    series = [[_number(row[column - 1]) for row in rows] for column, _ in columns]
    assert any(value is not None for values in series for value in values), f"no figure in any column of: {what}"
    return _svg(title, [_plain(row[0]) for row in rows], [name for _, name in columns], series)


def _number(cell: str) -> float | None:
    """The figure in a cell; ``None`` where there is none, or more than one."""
    found = _NUMBER.match(cell)
    return float(found[0].replace(",", "")) if found and cell[found.end() : found.end() + 1] != "," else None


def _plain(cell: str) -> str:
    return re.sub(r"[`*]|\]\([^)]*\)|\[", "", cell)


def _svg(title: str, labels: Sequence[str], names: Sequence[str], series: Sequence[Sequence[float | None]]) -> str:
    """Groups of horizontal bars, one group for each label, one bar in it for each name."""
    colours = _COLOURS if len(names) > 1 else _ONE_COLOUR
    longest = max(value for values in series for value in values if value is not None)
    step = _BAR * len(names) + _GAP
    height = _TOP + step * len(labels)
    parts = [
        f'<svg class="figure" role="img" viewBox="0 0 {_WIDTH} {height}" xmlns="http://www.w3.org/2000/svg">',
        f"<title>{html.escape(title)}</title>",
        f'<text x="0" y="14" font-weight="bold">{html.escape(title)}</text>',
    ]
    for index, name in enumerate(names if len(names) > 1 else ()):
        x = _LABELS + 130 * index
        parts.append(f'<rect x="{x}" y="22" width="10" height="10" fill="{colours[index]}"/>')
        parts.append(f'<text x="{x + 15}" y="31">{html.escape(name)}</text>')
    for row, label in enumerate(labels):
        top = _TOP + step * row
        middle = top + _BAR * len(names) / 2 + 4
        parts.append(f'<text x="{_LABELS - 8}" y="{middle:g}" text-anchor="end">{html.escape(label)}</text>')
        for index, values in enumerate(series):
            value = values[row]
            if value is None:
                continue
            y = top + _BAR * index
            width = max(1.0, (_WIDTH - _LABELS - _VALUES) * value / longest)
            parts.append(
                f'<rect class="bar" x="{_LABELS}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{colours[index]}"/>'
            )
            parts.append(f'<text x="{_LABELS + width + 5:.1f}" y="{y + 9}">{value:,g}</text>')
    return "\n".join([*parts, "</svg>"])
