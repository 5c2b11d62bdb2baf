"""The rooms of ``src/tailrace`` stand on one another: nobody imports from above, and no modules form a circle.

Imports inside functions and for type checking count too: they are how a circle is hidden.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import tailrace
from tailrace.pipeline import router, shard
from tests.tidy.parsing import parse

SOURCE = Path(tailrace.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "design" / "architecture.md"

#: From the ground up. Rooms in one tuple share a floor. ``tailrace`` itself is the front door: it loads nothing.
FLOORS = (
    ("errors", "version", "printable"),
    ("health", "metrics_server", "service_manager", "threads"),
    ("raw_bson",),
    ("oplog",),
    ("event",),
    ("expression",),
    ("plan",),
    ("stage",),
    ("kernel", "pipeline"),
    ("cursor",),
    ("source",),
    ("durable", "lmdb_file"),
    ("archive",),
    ("images",),
    ("tail",),
    ("snapshot",),
    ("client",),
    ("compare",),
    ("consumer",),
    ("gateway",),
    ("testing",),
    ("lake",),
    ("tables",),
    ("cache",),
    ("embedded",),
    ("spark",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
#: The same inside a room; modules beside these stand above them.
FLOORS_INSIDE = {"expression": (("values",), ("language",), ("match", "operators"), ("stages",))}

Graph = dict[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(text: str, modules: set[str]) -> Iterator[str]:
    """Which of ``modules`` a text imports, wherever in it."""
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & modules
            if names - modules and node.module in modules:
                yield node.module


@functools.cache
def graph() -> Graph:
    paths = {module_name(path): path for path in SOURCE.rglob("*.py")}
    return {name: set(imports(path.read_text(), set(paths))) - {name, "tailrace"} for name, path in paths.items()}


def circles(edges: Graph) -> list[list[str]]:
    """Modules that can be reached from one another, a list for each circle: what is left after all that import nothing
    in the rest, and all that nothing in the rest imports, are taken away again and again."""
    left = dict(edges)
    while True:
        used = {name for names in left.values() for name in names}
        kept = {name: names & left.keys() for name, names in left.items() if names & left.keys() and name in used}
        if kept == left:
            break
        left = kept
    found: list[list[str]] = []
    while left:
        start = min(left)
        ring = {start} | {name for name in left if start in reached(left, name) and name in reached(left, start)}
        found.append(sorted(ring))
        left = {name: names - ring for name, names in left.items() if name not in ring}
        left = {name: names & left.keys() for name, names in left.items()}
    return [ring for ring in found if len(ring) > 1]


def reached(edges: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in edges.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def room(name: str, depth: int) -> str:
    parts = name.split(".")
    return parts[depth] if len(parts) > depth else ""


def climbs(edges: Graph, floors: tuple[tuple[str, ...], ...], inside: str = "tailrace") -> list[str]:
    """The imports that lead upwards among the rooms of a package."""
    depth = inside.count(".") + 1
    floor = {name: number for number, names in enumerate(floors) for name in names}
    here = {name for name in edges if name.startswith(f"{inside}.")}
    return [
        f"{name} imports {imported}"
        for name in sorted(here)
        for imported in sorted(edges[name] & here)
        if floor.get(room(imported, depth), len(floors)) > floor.get(room(name, depth), len(floors))
    ]


def test_every_room_has_a_floor() -> None:
    rooms = {room(name, 1) for name in graph()} - {""}
    assert rooms == {name for names in FLOORS for name in names}


def test_nobody_imports_from_above() -> None:
    assert climbs(graph(), FLOORS) == []
    for name, floors in FLOORS_INSIDE.items():
        assert climbs(graph(), floors, f"tailrace.{name}") == []


def test_no_modules_import_one_another_in_a_circle() -> None:
    assert circles(graph()) == []


def test_an_import_from_above_and_a_circle_would_be_found() -> None:
    modules = {"tailrace.oplog.a", "tailrace.client.b", "tailrace.client.c"}
    assert list(imports("def f():\n    from tailrace.client import b\n", modules)) == ["tailrace.client.b"]
    assert list(imports("if TYPE_CHECKING:\n    import tailrace.oplog.a\n", modules)) == ["tailrace.oplog.a"]
    edges = {"tailrace.oplog.a": {"tailrace.client.b"}, "tailrace.client.b": {"tailrace.client.c"}}
    edges["tailrace.client.c"] = {"tailrace.client.b"}
    assert climbs(edges, FLOORS) == ["tailrace.oplog.a imports tailrace.client.b"]
    assert circles(edges) == [["tailrace.client.b", "tailrace.client.c"]]
    bridged = {"a": {"b"}, "b": {"a", "aa"}, "aa": {"c"}, "c": {"d"}, "d": {"c"}, "e": {"a"}}
    assert circles(bridged) == [["a", "b"], ["c", "d"]]


def marked(name: str) -> list[str]:
    """The first column of a marked table of the page, as the names in it."""
    table = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", PAGE.read_text(), re.DOTALL)
    assert table is not None, f"{PAGE.name} has no place marked {name}"
    return [found for row in table[1].splitlines()[2:] for found in re.findall(r"`(\w+)`", row.split("|")[1])]


def test_the_page_on_the_architecture_shows_the_floors() -> None:
    assert marked("floors") == [name for names in FLOORS for name in names if name != "__main__"]


def test_the_page_on_the_architecture_shows_the_stages() -> None:
    assert marked("SHARD_STAGES") == [stage.__name__ for stage in shard.SHARD_STAGES]
    assert marked("ROUTER_STAGES") == [stage.__name__ for stage in router.ROUTER_STAGES]
