"""A comparison on a deployment: its own change stream, from a replica set or through its mongos, and ours over its
oplogs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from bson.raw_bson import RawBSONDocument

from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.profile import Knowledge, knowledge_of
from tailrace.errors import ServerError, SourceError, TailraceError, UsageError
from tailrace.watch.client import ChangeStream, Client, connect, operation_time, watch_scope
from tailrace.watch.client.client import readers_of
from tailrace.watch.compare.comparison import Compared, ComparisonLimits, StreamComparison
from tailrace.watch.compare.evidence import Evidence
from tailrace.watch.compare.mask import Mask
from tailrace.watch.compare.reading import Opener
from tailrace.watch.compare.report import report_of, write_report

#: How long a read waits for events, and so how long the end may take.
_AWAIT_MS: Final = 500
_UNAUTHORIZED: Final = 13
_BATCH: Final = 1000
_FROM_IMAGES: Final = ("whenAvailable", "required")


@dataclass(frozen=True, kw_only=True)
class Streams:
    """What both streams are asked for: parameters of ``watch``, by their names. ``options`` are further ones of the
    stage, by the server's names, which may be named here too (``show_system_events``, ``show_migration_events``)."""

    pipeline: Sequence[Mapping[str, Any]] = ()
    full_document: str | None = None
    full_document_before_change: str | None = None
    show_expanded_events: bool = False
    show_system_events: bool = False
    show_migration_events: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    collation: Mapping[str, Any] | None = None

    @property
    def said(self) -> dict[str, Any]:
        """The options of the stage, by the server's names."""
        said = {
            "fullDocument": self.full_document,
            "fullDocumentBeforeChange": self.full_document_before_change,
            "showExpandedEvents": self.show_expanded_events or None,
            **self.further,
        }
        return {name: value for name, value in said.items() if value is not None}

    @property
    def further(self) -> dict[str, Any]:
        """The options of the stage that ``watch`` has no parameters for."""
        named = {"showSystemEvents": self.show_system_events, "showMigrationEvents": self.show_migration_events}
        return {**self.options, **{name: True for name, value in named.items() if value}}

    @property
    def has_images(self) -> bool:
        """Whether the events hold what the server makes of stored images."""
        return self.full_document_before_change not in (None, "off") or self.full_document in _FROM_IMAGES


class DeploymentComparison:
    """``with DeploymentComparison(uri, "shop.orders") as comparison: comparison.run()``. Only reads.

    Args:
        uri: the URI of a replica set, or of a cluster's mongos
        namespace: a database or a collection; ``None``: everything
    """

    def __init__(self, uri: Any, namespace: str | Scope | None = None, streams: Streams | None = None) -> None:
        self.scope = namespace if isinstance(namespace, Scope) else Scope.parse(namespace)
        self.streams = streams or Streams()
        self.compared: Compared | None = None
        self._comparison: StreamComparison | None = None
        self._stopped = threading.Event()
        with ExitStack() as stack:
            self._ours: Client[Any] = stack.enter_context(connect(uri, engine="oplog"))
            self._server: Client[Any] = stack.enter_context(connect(uri, engine="server"))
            self._stack = stack.pop_all()

    @property
    def client(self) -> Client[Any]:
        """The client through which the server's stream is read."""
        return self._server

    @cached_property
    def is_cluster(self) -> bool:
        """Whether it is a sharded cluster. Raises SourceError if it cannot be reached."""
        return readers_of(self._ours).cluster is not None

    @cached_property
    def server_version(self) -> str:
        """The server's version; for a cluster, the lowest version among its shards."""
        readers = readers_of(self._ours)
        return readers.source.server_version if readers.cluster is None else readers.cluster.server_version()

    def look_at_version(self) -> None:
        """Ask for the server's version again: a deployment may be upgraded while it is compared. Raises SourceError."""
        vars(self).pop("server_version", None)
        self.server_version  # noqa: B018  it is read here, where it may fail, and not by who makes a report

    @property
    def knowledge(self) -> Knowledge:
        """What Tailrace's rules for the version are taken from."""
        return knowledge_of(self.server_version)

    def opener_of_server(self, batch: int = _BATCH) -> Opener:
        """Opens the server's own stream, which gives ``batch`` events at a time. Raises UsageError where the deployment
        has none for the whole cluster."""
        if self.is_cluster and not self._server.is_mongos:
            raise UsageError(
                "a cluster's own change stream comes from its mongos",
                hint="Give the URI of a mongos, not that of a config server",
            )

        def opened(start: Mapping[str, Any]) -> ChangeStream:
            try:
                return self._watch(self._server, {"batch_size": batch, **start})
            except ServerError as error:
                raise self._explained(error) from None

        return opened

    def opener_of_ours(self) -> Opener:
        """Opens our stream over the oplogs."""

        def opened(start: Mapping[str, Any]) -> ChangeStream:
            try:
                return self._watch(self._ours, start)
            except SourceError as error:
                if error.code != _UNAUTHORIZED:
                    raise
                raise SourceError(
                    f"nothing can be compared: {error.message}", code=error.code, hint=error.hint
                ) from None

        return opened

    def run(
        self,
        limits: ComparisonLimits | None = None,
        *,
        progress: Callable[[Compared], None] = lambda compared: None,
        seed: int | None = None,
    ) -> Compared:
        """Compare until ``limits`` or ``stop`` say so; ``progress`` is called every ten seconds. Raises TailraceError
        where a stream cannot be opened, or one does not come to the end."""
        comparison = self.prepare(limits or ComparisonLimits(), progress=progress, seed=seed)
        return comparison.run()

    def prepare(
        self,
        limits: ComparisonLimits,
        *,
        progress: Callable[[Compared], None] = lambda compared: None,
        seed: int | None = None,
    ) -> StreamComparison:
        """The comparison, for the caller to run; ``compared``, ``stop`` and ``report`` refer to the last one. Raises
        TailraceError if there is nothing to compare, or the deployment cannot be reached."""
        rate = limits.events_per_second
        comparison = self._comparison = StreamComparison(
            self.opener_of_server(_BATCH if rate is None else max(1, min(_BATCH, int(rate)))),
            self.opener_of_ours(),
            lambda: operation_time(self._ours),
            limits,
            evidence=Evidence(self._ours, images=self.streams.has_images),
            progress=progress,
            looks_up=self.streams.full_document == "updateLookup",
            has_stages=bool(self.streams.pipeline),
            has_one_oplog=not self.is_cluster,
            seed=seed,
        )
        self.compared = comparison.compared
        if self._stopped.is_set():
            comparison.stop()
        return comparison

    def try_to_open(self) -> None:
        """Open both streams and close them again. Raises TailraceError if one cannot be opened: because a right is
        missing, or because the server does not have the options."""
        start = {"start_at_operation_time": operation_time(self._ours).to_timestamp()}
        for opener in (self.opener_of_ours(), self.opener_of_server()):
            opener(start).close()

    def stop(self) -> None:
        """End ``run`` soon, with what was compared until then. From any thread, or a signal handler."""
        self._stopped.set()
        if self._comparison is not None:
            self._comparison.stop()

    def report(self, *, show_names: bool = False) -> dict[str, Any]:
        """The report (``tailrace.watch.compare.report``), with users' values masked, and their names too unless they
        are to be shown. Raises UsageError before ``run``."""
        if self.compared is None:
            raise UsageError("nothing was compared yet", hint="Call run() first")
        return report_of(
            self.compared,
            server=self.server_version,
            is_cluster=self.is_cluster,
            scope=self.scope,
            stage=self.streams.said,
            stages=[name for stage in self.streams.pipeline for name in list(stage)[:1]],
            mask=Mask(show_names=show_names),
        )

    def write_report(self, path: str | Path, *, show_names: bool = False) -> None:
        """Write the report: as BSON where the name ends in ``.bson``, else as extended JSON."""
        write_report(self.report(show_names=show_names), Path(path))

    def close(self) -> None:
        """Close the connections."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _watch(self, client: Client[Any], start: Mapping[str, Any]) -> ChangeStream:
        streams = self.streams
        return watch_scope(
            client,
            self.scope,
            pipeline=list(streams.pipeline),
            full_document=streams.full_document,
            full_document_before_change=streams.full_document_before_change,
            show_expanded_events=streams.show_expanded_events or None,
            options=streams.further or None,
            collation=streams.collation,
            document_class=RawBSONDocument,
            max_await_time_ms=_AWAIT_MS,
            **start,
        )

    def _explained(self, error: ServerError) -> TailraceError:
        """The server's refusal; a missing right without the whole command, which it repeats."""
        if error.code != _UNAUTHORIZED:
            return error
        what = "all databases" if self.scope.database is None else f"{self.scope}"
        role = "readAnyDatabase" if self.scope.database is None else f"read on {self.scope.database}"
        return SourceError(
            f"this user may not open the server's own change stream on {what}",
            code=error.code,
            hint=f"Grant it the role {role}, or the actions find and changeStream there",
        )
