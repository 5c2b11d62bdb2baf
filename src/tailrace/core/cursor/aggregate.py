"""The ``aggregate`` command of a change stream: what it asks for, and what the server says if something is wrong with
it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tailrace.core import raw_bson
from tailrace.core.cursor.command import GENERIC_FIELDS, Fields
from tailrace.core.cursor.fields_of_44 import check_aggregate
from tailrace.core.event.bson_text import spaced_document_text
from tailrace.core.expression.language.version import USUAL, Version, knows
from tailrace.core.expression.stages.pipeline import check_name
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.profile import ServerProfile, profile_for
from tailrace.core.raw_bson import ARRAY, BOOL, DOUBLE, INT32, INT64, OBJECT, STRING, Element
from tailrace.errors import ServerError, UsageError

#: Documents in a first batch whose size the command does not say; it holds for change streams too (6.0.27).
FIRST_BATCH_DEFAULT: Final = 101
_CHANGE_STREAM: Final = b"$changeStream"
_COMMAND_NOT_SUPPORTED: Final = 115
_FIELDS: Final = GENERIC_FIELDS | {
    b"aggregate",
    b"allowDiskUse",
    b"bypassDocumentValidation",
    b"collation",
    b"collectionUUID",
    b"cursor",
    b"exchange",
    b"explain",
    b"fromMongos",
    b"hint",
    b"let",
    b"maxTimeMS",
    b"needsMerge",
    b"pipeline",
    b"$_generateV2ResumeTokens",
}


@dataclass(frozen=True, slots=True)
class AggregateCommand:
    """A change stream as it was asked for. ``stage`` is the document inside ``$changeStream``, ``pipeline`` the stages
    after it, ``batch_size`` that of the first batch; 0 reads nothing."""

    database: str
    collection: str | None
    stage: bytes
    pipeline: tuple[bytes, ...]
    batch_size: int
    let: bytes | None
    collation: bytes | None
    #: ``None``: as the server does where nobody says.
    generate_v2_tokens: bool | None
    needs_merge: bool

    @classmethod
    def parse(cls, database: str, command: bytes, version: Version = USUAL) -> AggregateCommand:
        """Raises ``UsageError`` with the code and the message of a server of ``version``. The stage's options are
        ``options``'s matter."""
        if not knows(version, "5.0"):
            _check_as_44(database, command)
        known = _FIELDS if knows(version, "6.0") else _FIELDS - {b"$_generateV2ResumeTokens"}
        fields = Fields("aggregate", command, known, version, _CHECKS)
        collection = _collection(database, fields)
        stages = _stages(fields)
        _refuse_what_changes(fields)
        _check_read_concern(fields)
        batch_size = _batch_size(fields)
        needs_merge = fields.boolean(b"needsMerge")
        if needs_merge and not fields.boolean(b"fromMongos"):
            raise UsageError("Cannot specify 'needsMerge' without 'fromMongos'", code=9)
        names = [_single_field(stage) for stage in stages]
        if any(element.name == _CHANGE_STREAM for element in names[1:]):
            raise _misplaced(database, collection, version, stages)
        stage = _stream_stage(stages, names, version)
        return cls(
            database=database,
            collection=collection,
            stage=stage,
            pipeline=tuple(stages[1:]),
            batch_size=FIRST_BATCH_DEFAULT if batch_size is None else batch_size,
            let=fields.object(b"let"),
            collation=fields.object(b"collation"),
            generate_v2_tokens=fields.said(b"$_generateV2ResumeTokens"),
            needs_merge=needs_merge,
        )

    @property
    def namespace(self) -> str:
        """What replies call it, and what a getMore must name."""
        return f"{self.database}.{'$cmd.aggregate' if self.collection is None else self.collection}"

    @property
    def scope(self) -> Scope:
        return _scope(self.database, self.collection, self.stage)

    def options(self, profile: ServerProfile | None = None) -> StreamOptions:
        """The stream's options, checked as a server of ``profile``'s version does.

        Raises ``UsageError`` and ``InvalidResumeToken``.
        """
        version = USUAL if profile is None else profile.version
        if self.let is not None and not knows(version, "5.0"):
            raise UsageError("unrecognized field 'let'", code=9)
        if self.generate_v2_tokens and knows(version, "7.0"):  # which gives no others unless it is asked for them
            raise UsageError("Invalid request for v2 tokens", code=6528200)
        for stage in self.pipeline:
            check_name(_single_field(stage).name.decode("utf-8", "replace"), version)
        return StreamOptions.parse(
            self.scope,
            self.stage,
            self.pipeline,
            generate_v2_tokens=self.generate_v2_tokens,
            needs_merge=self.needs_merge,
            let=self.let,
            collation=self.collation,
            profile=profile,
        )


def is_change_stream(command: bytes) -> bool:
    """Whether an aggregate command holds a ``$changeStream`` stage anywhere on the pipeline's top level: whether it is
    for this package."""
    pipeline = raw_bson.find(command, b"pipeline")
    if pipeline is None or pipeline.type != ARRAY:
        return False
    stages = raw_bson.value(command, pipeline)
    for stage in raw_bson.elements(stages):
        if stage.type == OBJECT:
            first = next(raw_bson.elements(raw_bson.value(stages, stage)), None)
            if first is not None and first.name == _CHANGE_STREAM:
                return True
    return False


def check_kind(namespace: str, kind: str, version: Version) -> None:
    """Raise ``ServerError`` 166 where the namespace is no collection, with the message of a server of ``version``."""
    if kind == "view":
        raise ServerError(f"Namespace {namespace} is a view, not a collection", code=166)
    if kind == "timeseries" and knows(version, "7.0"):
        raise ServerError(f"Cannot run aggregation on timeseries with namespace {namespace}", code=166)
    if kind == "timeseries":
        raise ServerError(f"Namespace {namespace} is a timeseries collection", code=166)


def _check_as_44(database: str, command: bytes) -> None:
    every = Fields("aggregate", command, frozenset(element.name for element in raw_bson.elements(command)))
    _collection(database, every)
    if every.get(b"pipeline") is None:
        raise UsageError("'pipeline' option must be specified as an array", code=14)
    _stages(every)
    check_aggregate(command)


def _collection(database: str, fields: Fields) -> str | None:
    target = fields.get(b"aggregate")
    if target is None:
        raise UsageError("BSON field 'aggregate.aggregate' is missing but a required field", code=40414)
    if target.type == STRING:
        name = fields.text(target)
        if "\0" in name:
            raise UsageError("namespaces cannot have embedded null characters", code=73)
        if not name or not database:
            raise UsageError(f"Invalid namespace specified '{database}.{name}'", code=73)
        return name
    if target.type not in (INT32, INT64, DOUBLE):
        raise UsageError(f"collection name has invalid type: {raw_bson.type_name(target.type)}", code=14)
    if fields.decoded(target) != 1:
        raise UsageError("Invalid command format: the 'aggregate' field must specify a collection name or 1", code=9)
    return None


def _stages(fields: Fields) -> list[bytes]:
    element = fields.get(b"pipeline")
    if element is None:
        raise UsageError("BSON field 'aggregate.pipeline' is missing but a required field", code=40414)
    if element.type != ARRAY:
        raise UsageError("'pipeline' option must be specified as an array", code=14)
    array = fields.value(element)
    stages = []
    for stage in raw_bson.elements(array):
        if stage.type != OBJECT:
            raise UsageError("Each element of the 'pipeline' array must be an object", code=14)
        stages.append(raw_bson.value(array, stage))
    return stages


def _scope(database: str, collection: str | None, stage: bytes) -> Scope:
    if collection is not None:
        return Scope.of_collection(database, collection)
    if database == "admin":
        whole = raw_bson.find(stage, b"allChangesForCluster")
        if whole is not None and whole.type == BOOL and raw_bson.value(stage, whole) == b"\x01":
            return Scope.cluster()
    return Scope.of_database(database)


def _stream_stage(stages: list[bytes], names: list[Element], version: Version) -> bytes:
    """The document inside the leading ``$changeStream``."""
    if not names or names[0].name != _CHANGE_STREAM:
        raise UsageError("an aggregation without $changeStream cannot be run here", code=_COMMAND_NOT_SUPPORTED)
    if names[0].type != OBJECT:
        if not knows(version, "6.0"):
            raise UsageError("$changeStream stage expects a document as argument.", code=50808)
        found = spaced_document_text(stages[0])[2:-2]
        raise UsageError(f"$changeStream must take a nested object but found: {found}", code=6188500)
    return raw_bson.value(stages[0], names[0])


def _misplaced(database: str, collection: str | None, version: Version, stages: list[bytes]) -> UsageError:
    """What is said of a ``$changeStream`` that is not the first stage. The server looks at places after it has parsed
    every stage, so an option that is wrong in any of them is what it speaks of (measured on 6.0.27)."""
    profile = profile_for(version)
    for stage in stages:
        name = _single_field(stage)
        if name.name == _CHANGE_STREAM:
            options = _stream_stage([stage], [name], version)
            StreamOptions.parse(_scope(database, collection, options), options, profile=profile)
    shown = "$_internalChangeStreamOplogMatch" if knows(version, "6.0") else "$changeStream"
    dot = "" if knows(version, "6.0") else "."
    return UsageError(f"{shown} is only valid as the first stage in a pipeline{dot}", code=40602)


def _single_field(stage: bytes) -> Element:
    elements = list(raw_bson.elements(stage))
    if len(elements) != 1:
        raise UsageError("A pipeline stage specification object must contain exactly one field.", code=40323)
    return elements[0]


def _batch_size(fields: Fields) -> int | None:
    element = fields.get(b"cursor")
    if element is None:
        raise UsageError("The 'cursor' option is required, except for aggregate with the explain argument", code=9)
    if element.type != OBJECT:
        raise UsageError("cursor field must be missing or an object", code=14)
    return Fields("cursor", fields.value(element), frozenset({b"batchSize"})).not_negative(b"batchSize")


def _check_explain(fields: Fields) -> None:
    explain = fields.get(b"explain")
    if explain is not None and explain.type != BOOL:
        raise UsageError("explain must be a boolean", code=14)


def _check_hint(fields: Fields) -> None:
    hint = fields.get(b"hint")
    if hint is not None and hint.type not in (STRING, OBJECT):
        raise UsageError("Hint must be a string or an object", code=9)


def _boolean(name: bytes) -> Callable[[Fields], object]:
    return lambda fields: fields.boolean(name)


def _object(name: bytes) -> Callable[[Fields], object]:
    return lambda fields: fields.object(name)


#: What is checked of each field where it stands. Fields that change nothing here are checked too.
_CHECKS: Final[dict[bytes, Callable[[Fields], object]]] = {
    b"pipeline": _stages,
    b"cursor": _batch_size,
    b"maxTimeMS": Fields.check_time_limit,
    b"explain": _check_explain,
    b"hint": _check_hint,
    **{name: _boolean(name) for name in (b"allowDiskUse", b"fromMongos", b"needsMerge", b"$_generateV2ResumeTokens")},
    **{name: _object(name) for name in (b"collation", b"readConcern", b"let")},
}


def _refuse_what_changes(fields: Fields) -> None:
    """Refuse fields that would change something here, and are not supported."""
    if fields.boolean(b"explain") or fields.given(b"exchange") is not None:
        raise UsageError("explain and exchange are not supported here", code=_COMMAND_NOT_SUPPORTED)
    autocommit = fields.get(b"autocommit")
    if autocommit is not None:
        raise UsageError(
            "Operation not permitted in transaction :: caused by :: Aggregation stage $changeStream cannot run within "
            "a multi-document transaction.",
            code=263,
        )


def _check_read_concern(fields: Fields) -> None:
    concern = fields.object(b"readConcern")
    element = None if concern is None else raw_bson.find(concern, b"level")
    if concern is None or element is None or element.type != STRING:
        return
    level = raw_bson.read_string(concern, element.value_start).decode("utf-8", "replace")
    if level not in ("local", "majority", "linearizable", "available", "snapshot"):
        raise UsageError(
            "readConcern.level must be either 'local', 'majority', 'linearizable', 'available', or 'snapshot'", code=9
        )
    if level != "majority":
        inner = spaced_document_text(concern)[2:-2]
        raise UsageError(
            f'Command aggregate does not support {{ readConcern: {{ {inner}, provenance: "clientSupplied" }} }} '
            ":: caused by :: Aggregation stage $changeStream cannot run with a readConcern other than 'majority'. "
            f"Current readConcern: {level}",
            code=72,
        )
