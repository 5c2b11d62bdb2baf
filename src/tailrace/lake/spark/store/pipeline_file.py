"""The file that ``tailrace run`` takes: YAML to checked settings. ``examples/pipeline.yaml`` explains each of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from bson import json_util

from tailrace.base.yaml_file import read_yaml
from tailrace.core.user_text import nearest
from tailrace.errors import UsageError
from tailrace.lake.iceberg.settings import IcebergSettings, check_place
from tailrace.lake.spark.query.options import KNOWN
from tailrace.lake.spark.store import message_settings
from tailrace.lake.spark.store.message_settings import MessageSettings, messages_of
from tailrace.lake.store.compaction_policy import CompactionPolicy
from tailrace.lake.store.lake_root import LakeRoot, writable_root
from tailrace.lake.store.local_path import local_path
from tailrace.lake.store.partitioning import Partitioning
from tailrace.lake.store.pipeline_values import shown, size, whole_number
from tailrace.lake.store.quarantine import ON_ERRORS
from tailrace.lake.tables.section import KEYS, settings_of
from tailrace.lake.tables.settings import TableSettings
from tailrace.read.source import mask_file
from tailrace.read.source.mask_file import Masks
from tailrace.read.source.uri import URI_VARIABLE, find_uri

_LIMITS: Final = ("maxEventsPerTrigger", "maxBytesPerTrigger")
#: Options of the source that have a place of their own in the file.
_ELSEWHERE: Final = {"columns": "lake", "documents": "lake", **dict.fromkeys(_LIMITS, "limits")}
#: That which has a section of its own.
_MASKS: Final = "masks"
#: It holds entries by name; the keys are those of each.
_MESSAGES: Final = "messages"
_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "source": tuple(name for name in KNOWN if name not in _ELSEWHERE and name != _MASKS),
    "lake": ("path", "state", "checkpoint", "columns", "documents", "acceptGap", "partitionBy", "onError", "iceberg"),
    "trigger": ("every", "availableNow"),
    "archive": ("path", "keep", "keepBytes", "preImages"),
    "limits": _LIMITS,
    "compaction": ("every", "targetBytes", "fanIn", "retention"),
    "tables": KEYS,
    _MESSAGES: message_settings.KEYS,
    _MASKS: mask_file.KEYS,
    "spark": ("cores", "memory", "config"),
}
#: How often a stream commits unless the file says otherwise. Without a pause it commits several times a second while
#: there is load, and each commit makes a file.
_EVERY: Final = "1 second"
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"([0-9]{1,6}) *(minute|hour|day)s?")


@dataclass(frozen=True, slots=True)
class ArchiveSettings:
    """An archive to keep in addition to the lake: where, and for how long (``None``: all of it)."""

    path: Path
    keep_seconds: float | None
    keep_bytes: int | None
    images: bool


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """A checked pipeline file. ``source`` holds the options of ``format("tailrace")`` as text; paths are absolute."""

    source: dict[str, str] = field(repr=False)
    lake: LakeRoot
    checkpoint: Path | None
    processing_time: str | None
    available_now: bool
    compaction: CompactionPolicy
    cores: int | None
    memory: str
    spark_config: dict[str, str]
    accept_gap: bool = False
    partition_by: tuple[str, ...] | None = None
    on_error: str = "fail"
    iceberg: IcebergSettings | None = field(default=None, repr=False)
    archive: ArchiveSettings | None = None
    tables: TableSettings | None = None
    messages: tuple[MessageSettings, ...] = ()
    masks: Masks | None = None


def load(path: Path | str, environment: Mapping[str, str] = os.environ) -> PipelineSettings:
    """Read and check the pipeline file at ``path``; ``${NAME}`` in any text is replaced by that environment variable.

    Paths in it are relative to the file. Raises UsageError that names the file, the key and what is wrong.
    """
    file = Path(path)
    document = read_yaml(file)
    try:
        return _settings(document, file.absolute().parent, environment)
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", hint=error.hint) from None


def _settings(document: object, base: Path, environment: Mapping[str, str]) -> PipelineSettings:
    sections = _mapping(document, "the file")
    _check_keys(sections, _SECTIONS, "")
    parts: dict[str, dict[str, Any]] = {}
    for name, known in _SECTIONS.items():
        parts[name] = _mapping(_expanded(sections.get(name, {}), environment), name)
        if name != _MESSAGES:
            _check_keys(parts[name], known, f"{name}.")
    source, lake, trigger, spark = parts["source"], parts["lake"], parts["trigger"], parts["spark"]
    source["uri"] = _uri(source.get("uri"), base, environment)
    _check_names(source)
    for name in ("archive", "images"):
        if name in source:
            source[name] = str(local_path(_text(source[name], f"source.{name}"), f"source.{name}", base))
    if "path" not in lake:
        raise UsageError("lake.path is missing: the directory that the events go to")
    root = _lake_root(lake, base)
    options = {**source, **parts["limits"]}
    options.update({key: lake[key] for key in ("columns", "documents") if key in lake})
    available_now = _flag(trigger.get("availableNow", False), "trigger.availableNow")
    if available_now and "every" in trigger:
        raise UsageError("trigger.every and trigger.availableNow cannot be used together")
    masks = Masks.of(parts[_MASKS], base) if _MASKS in sections else None
    _check_masks(masks, parts)
    if masks is not None:
        options[_MASKS] = masks.to_json()
    tables = settings_of(parts["tables"], base) if parts["tables"] else None
    return PipelineSettings(
        source={name: _option(name, value) for name, value in options.items()},
        lake=root,
        checkpoint=_path(lake, "checkpoint", base) if "checkpoint" in lake else None,
        processing_time=None if available_now else _interval(trigger.get("every", _EVERY)),
        available_now=available_now,
        compaction=_compaction(parts["compaction"]),
        cores=whole_number(spark["cores"], "spark.cores", least=1) if "cores" in spark else None,
        memory=_text(spark.get("memory", "1g"), "spark.memory"),
        spark_config={key: _option(key, value) for key, value in _mapping(spark.get("config"), "spark.config").items()},
        accept_gap=_flag(lake.get("acceptGap", False), "lake.acceptGap"),
        partition_by=_partition_by(lake["partitionBy"]) if "partitionBy" in lake else None,
        on_error=_on_error(lake.get("onError", "fail")),
        iceberg=IcebergSettings.of(lake["iceberg"], "lake.iceberg") if "iceberg" in lake else None,
        archive=_archive(parts["archive"], base) if parts["archive"] else None,
        tables=None if tables is None else replace(tables, masks=masks),
        messages=messages_of(parts[_MESSAGES], masks, base),
        masks=masks,
    )


def _check_names(source: Mapping[str, Any]) -> None:
    """What is watched is named by texts: YAML reads ``on`` as true and ``1.10`` as 1.1, and another name would be
    watched in silence."""
    for key in ("database", "collection"):
        if key in source and (not isinstance(source[key], str) or not source[key]):
            hint = "Several collections: source.collections" if isinstance(source[key], list) else "Write it in quotes"
            raise UsageError(f"source.{key} must be a name, not {shown(source[key])}", hint=hint)
    names = source.get("collections", "")
    names = names if isinstance(names, list) else [names]
    for name in names:
        if not isinstance(name, str):
            raise UsageError(
                f"source.collections must be names such as shop.orders, not {shown(name)}", hint="Write them in quotes"
            )


def _check_masks(masks: Masks | None, parts: Mapping[str, Mapping[str, Any]]) -> None:
    if masks is not None and parts["archive"]:
        raise UsageError(
            "masks and archive cannot be used together: an archive keeps oplog entries as they are, whole values in "
            "them",
            hint="Leave one of them out, or keep the archive apart, with tailrace archive, where whole values may be",
        )


def _partition_by(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise UsageError(f"lake.partitionBy must be a list of day, hour and collection, not {shown(value)}")
    return Partitioning.of(names).names


def _on_error(value: object) -> str:
    if value not in ON_ERRORS:
        raise UsageError(f"lake.onError must be one of {', '.join(ON_ERRORS)}, not {shown(value)}")
    return str(value)


def _archive(given: Mapping[str, Any], base: Path) -> ArchiveSettings:
    if "path" not in given:
        raise UsageError("archive.path is missing: the directory that the archive is kept in")
    keep = _duration(given["keep"], "archive.keep").total_seconds() if "keep" in given else None
    return ArchiveSettings(
        path=local_path(_text(given["path"], "archive.path"), "archive.path", base),
        keep_seconds=keep,
        keep_bytes=size(given["keepBytes"], "archive.keepBytes") if "keepBytes" in given else None,
        images=_flag(given.get("preImages", True), "archive.preImages"),
    )


def _uri(value: object, base: Path, environment: Mapping[str, str]) -> str:
    """``source.uri``: the URI itself, ``@`` and a file that holds it, or nothing for the variable TAILRACE_URI."""
    if value is None and not environment.get(URI_VARIABLE, "").strip():
        raise UsageError(
            "source.uri is missing",
            hint=f"Give it there, as ${{TAILRACE_URI}} from the environment, as @FILE, or set {URI_VARIABLE}",
        )
    text = None if value is None else _text(value, "source.uri")
    return find_uri(text, environment, base if text is not None else None).reveal()


def _mapping(value: object, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UsageError(f"{name} must hold keys and values, not {shown(value)}")
    return {str(key): inner for key, inner in value.items()}


def _check_keys(given: Iterable[str], known: Iterable[str], prefix: str) -> None:
    names = list(known)
    for key in given:
        if key in names:
            continue
        if prefix == "source." and key in _ELSEWHERE:
            raise UsageError(f"unknown key '{prefix}{key}'", hint=f"It belongs in '{_ELSEWHERE[key]}.{key}'")
        meant = nearest(key, names)
        hint = f"Did you mean '{prefix}{meant}'?" if meant else f"The known keys are {', '.join(names)}"
        raise UsageError(f"unknown key '{prefix}{key}'", hint=hint)


def _expanded(value: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _variable(match[1], environment), value)
    if isinstance(value, dict):
        return {key: _expanded(inner, environment) for key, inner in value.items()}
    if isinstance(value, list):
        return [_expanded(inner, environment) for inner in value]
    return value


def _variable(name: str, environment: Mapping[str, str]) -> str:
    if not _NAME.fullmatch(name):
        raise UsageError(f"'${{{name}}}' is not the name of an environment variable")
    if name not in environment:
        raise UsageError(f"the environment variable {name} is not set")
    return environment[name]


def _option(name: str, value: object) -> str:
    """A value as Spark's options want it, as text: a pipeline or a token as JSON, a list of names with commas."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, list) and name == "columns":
        return ",".join(str(item) for item in value)
    if isinstance(value, list | dict):
        return json_util.dumps(value, json_options=json_util.CANONICAL_JSON_OPTIONS)
    if hasattr(value, "isoformat"):
        return str(value.isoformat())  # YAML reads 2026-11-21T10:00:00Z as a moment
    raise UsageError(f"'{name}' does not have a usable value: {shown(value)}")


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name} must be text, not {shown(value)}")
    return value


def _path(lake: Mapping[str, Any], key: str, base: Path) -> Path:
    return local_path(_text(lake[key], f"lake.{key}"), f"lake.{key}", base)


def _lake_root(lake: Mapping[str, Any], base: Path) -> LakeRoot:
    """Where the lake is. What a lake in an object store does not have yet is refused before anything is begun."""
    state = _text(lake["state"], "lake.state") if "state" in lake else None
    root = writable_root(_text(lake["path"], "lake.path"), state, base=base, name="lake.path")
    if "iceberg" in lake:
        check_place(root, "a lake")
    return root


def _flag(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be true or false, not {shown(value)}")
    return value


def _interval(value: object) -> str:
    text = f"{value} seconds" if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not re.fullmatch(r"\d+(\.\d+)? *(milliseconds?|seconds?|minutes?|hours?)", text):
        raise UsageError(f"trigger.every must be a duration such as '1 second' or '5 minutes', not {shown(value)}")
    return text


def _compaction(given: Mapping[str, Any]) -> CompactionPolicy:
    default = CompactionPolicy()
    return CompactionPolicy(
        target_bytes=size(given.get("targetBytes", default.target_bytes), "compaction.targetBytes"),
        every=whole_number(given.get("every", default.every), "compaction.every", least=0),
        fan_in=whole_number(given.get("fanIn", default.fan_in), "compaction.fanIn", least=2),
        retention=_duration(given["retention"], "compaction.retention") if "retention" in given else default.retention,
    )


def _duration(value: object, name: str) -> timedelta:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise UsageError(f"{name} must be a time such as '7 days' or '12 hours', not {shown(value)}")
    return timedelta(**{f"{match[2]}s": int(match[1])})
