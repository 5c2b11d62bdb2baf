"""Nobody takes ``raw`` of PyMongo's documents but ``tailrace.core.raw_bson.bytes_of``.

From 4 kB on it is a ``memoryview``, although its type says bytes: it has no ``find``, and a copy of it in a set or a
dictionary is not what it looks like. Exact images could not begin if a document was that large, and mypy saw nothing
wrong.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tailrace
from tests.tidy.parsing import parse

SOURCE = Path(tailrace.__file__).parent
#: These names always stand for objects of our own classes, whose ``raw`` is bytes.
OURS = {"self", "batch", "self._batch", "read.batch", "run", "segment", "change"}
#: Other such objects, by module. A new entry is a promise that it is not one of PyMongo's documents.
OURS_IN = {
    "cli/dead_letters.py": {"letter"},
    "cli/panels/sources.py": {"letter"},
    "watch/client/kernel_loader.py": {"head"},
    "watch/gateway/quick.py": {"step.batch"},
    "watch/gateway/shared_steps.py": {"self.batch"},
    "watch/compare/comparison.py": {"event"},
    "watch/compare/pairing.py": {"event", "mine", "ours", "ours.events[0]", "server", "server.events[0]"},
    "act/consumer/change.py": {"self._raw"},
    "act/consumer/letter_erasure.py": {"letter"},
    "act/consumer/newer_changes.py": {"letter"},
    "read/images/fast.py": {"made", "operations"},
    "core/kernel/images.py": {"made"},
    "read/source/dump.py": {"document"},
    "read/source/dump_version.py": {"document"},
    "read/source/shard_reader.py": {"batches[-1]", "batches[0]", "next_"},
    "read/tail/feed.py": {"fed"},
}


def taken(path: Path) -> Iterator[tuple[str, int]]:
    """What ``raw`` is taken of, and the line."""
    text = path.read_text()
    if not re.search(r"\.\s*raw\b", text):  # parsing all modules takes six seconds of processor
        return
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Attribute) and node.attr == "raw":
            yield ast.unparse(node.value), node.lineno


def test_raw_is_taken_of_our_own_classes_alone() -> None:
    paths = {str(path.relative_to(SOURCE)): path for path in sorted(SOURCE.rglob("*.py"))}
    found = {
        name: {base for base, _ in taken(path)} - OURS for name, path in paths.items() if name != "core/raw_bson.py"
    }
    assert {name: bases for name, bases in found.items() if bases} == OURS_IN


def test_a_raw_is_noticed(tmp_path: Path) -> None:
    module = tmp_path / "new.py"
    module.write_text("for one in cursor:\n    one.raw.find(b'x')\n    other['key'].raw\n")
    assert sorted(taken(module), key=lambda one: one[1]) == [("one", 2), ("other['key']", 3)]
