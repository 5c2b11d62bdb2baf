"""The JSON Schema of the pipeline file compared with the reader of the file: what an editor accepts is read, and the
reverse."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tailrace.cli.main import main
from tailrace.errors import UsageError
from tailrace.lake.spark.query import options
from tailrace.lake.spark.store import pipeline_file
from tailrace.lake.spark.store.pipeline_file import _SECTIONS, load
from tailrace.lake.spark.store.pipeline_schema import pipeline_schema

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "docs" / "reference" / "pipeline.schema.json"
#: The YAML files among the examples that have a lake; others are dbt's.
PIPELINE_FILES = [path for path in sorted(ROOT.glob("examples/**/*.y*ml")) if "\nlake:" in f"\n{path.read_text()}"]
SCHEMA = Draft202012Validator(pipeline_schema())
LEAST: dict[str, dict[str, Any]] = {
    "source": {"uri": "mongodb://h/?replicaSet=r"},
    "lake": {"path": "./lake"},
    "archive": {"path": "a"},
    "tables": {"path": "t", "collections": ["a.b"]},
    "messages": {"to": "kafka://h:9092", "topic": "t", "collections": ["a.b"]},
    "masks": {"rules": {"a.b": {"c": "drop"}}},
}
#: Keys that these keys of an entry of ``messages`` need beside them.
GO_WITH: dict[str, dict[str, Any]] = {
    "topicPrefix": {"format": "debezium"},
    "tombstones": {"format": "debezium", "topicPrefix": "p"},
    "converter": {"format": "debezium", "topicPrefix": "p"},
    "schemaRegistry": {"format": "debezium", "topicPrefix": "p", "converter": "avro"},
    "afterDeadLetter": {"deadLetters": "k.letters"},
}
VALUES: list[Any] = [
    None, True, False, 0, 1, 2, -1, 1.5, "", "x", "5", "${HERE}", "1 second", "90 seconds", "7 days", "1d",
    "3 fortnights", "128m", "128 MB", "0m", "big", "now", "snapshot", "json", "day", "fail", "quarantine",
    "updateLookup", "exact", "bson", "structured", "gap", "skip",
    [], ["x"], ["day"], ["token", "token"], ["token"], ["shop.orders"], {}, {"a": 1},
    {"shop.*": None}, {"shop.*": {"columns": {"total": "int"}}}, {"shop.*": {"x": 1}}, [{"$match": {}}],
]  # fmt: skip
#: For the schema these values are free text: names, paths, positions, stages. Only the reader knows more.
FREE = {
    "source": {
        "uri", "database", "collection", "collections", "pipeline", "collation", "resumeAfter", "startAfter",
        "startAtOperationTime", "endAtOperationTime", "archive", "images",
    },
    "lake": {"path", "state", "columns"},
    "tables": {"path", "state", "collections"},
    "messages": {"topic", "topicPrefix", "collections", "pipeline", "leasesUri", "config"},
    "masks": {"key", "rules"},
    "spark": {"config", "memory"},
}  # fmt: skip
#: Accepted by the reader, although an editor does not propose them: empty values.
LENIENT = {("source", "uri", None), ("tables", "onMismatch", None), ("masks", "key", None)}


def cases() -> Iterator[tuple[str, str, Any]]:
    for section, keys in _SECTIONS.items():
        for key in keys:
            for value in VALUES:
                yield section, key, value


def document_of(section: str, key: str, value: Any) -> dict[str, Any]:
    made = copy.deepcopy({name: LEAST[name] for name in ("source", "lake")})
    keys = made.setdefault(section, copy.deepcopy(LEAST.get(section, {})))
    keys[key] = value
    if section == "messages":
        made["messages"] = {"orders": keys}
        keys.update(GO_WITH.get(key, {}))
        if keys.get("format") == "debezium":
            del keys["topic"]
            keys.setdefault("topicPrefix", "p")
    if key == "collection":
        made["source"]["database"] = "d"
    if key.startswith("fullDocument") and value == "exact":
        made["source"]["images"] = "i"
    return made


def complaint(document: Any, folder: Path) -> str | None:
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps(document))
    try:
        options.parse(load(path, {"HERE": "here"}).source)
    except UsageError as error:
        return error.message
    return None


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(pipeline_schema())


def test_each_key_of_the_file_is_in_the_schema_and_no_other() -> None:
    sections = pipeline_schema()["properties"]
    assert list(sections) == list(_SECTIONS)
    for name, keys in _SECTIONS.items():
        section = sections[name] if "anyOf" not in sections[name] else sections[name]["anyOf"][-1]
        found = (section["additionalProperties"] if name == "messages" else section)["properties"]
        assert set(found) == set(keys), name
        assert all("description" in one for one in found.values())


@pytest.mark.long
def test_what_is_read_is_good_and_what_is_refused_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The files are JSON, which reads the same and costs a fifth: there are four thousand of them.
    monkeypatch.setattr(pipeline_file, "read_yaml", lambda file: json.loads(file.read_text()))
    wrong = []
    for section, key, value in cases():
        document = document_of(section, key, value)
        said = complaint(document, tmp_path)
        good = SCHEMA.is_valid(document)
        is_text = isinstance(value, str) and key not in FREE.get(section, set())
        if said is None and not good and (section, key, value) not in LENIENT and not _as_text(section, value):
            wrong.append(f"{section}.{key}: {value!r} is read, and not good")
        if said is not None and good and key not in FREE.get(section, set()) and not (is_text and "${" in value):
            wrong.append(f"{section}.{key}: {value!r} is good, and refused: {said}")
    assert wrong == []


def _as_text(section: str, value: Any) -> bool:
    """The source's options are texts in the end: a flag or a number may be written as one, and the other way round."""
    return section in ("source", "limits") and isinstance(value, str | int | float)


@pytest.mark.parametrize("path", PIPELINE_FILES, ids=lambda path: path.name)
def test_the_examples_are_good(path: Path) -> None:
    assert [error.message for error in SCHEMA.iter_errors(yaml.safe_load(path.read_text()))] == []


def test_an_example_of_the_file_is_found() -> None:
    assert PIPELINE_FILES


def test_the_published_schema_is_this_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--schema"]) == 0
    printed = capsys.readouterr().out
    assert printed == PUBLISHED.read_text(), "tailrace run --schema > docs/reference/pipeline.schema.json"
    assert json.loads(printed) == pipeline_schema()


def test_a_misspelt_key_is_found_by_an_editor() -> None:
    [error] = SCHEMA.iter_errors({"source": {}, "lake": {"path": "p"}, "limits": {"maxEventPerTrigger": 3}})
    assert "maxEventPerTrigger" in error.message
