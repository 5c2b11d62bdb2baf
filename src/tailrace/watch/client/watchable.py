"""What the clients, databases and collections of both flavours have in common: how a ``watch`` becomes a request.

Their signatures are PyMongo's, so each flavour writes them out; what is done with the arguments is here, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, cast

from tailrace.core.oplog.namespace import Scope
from tailrace.read.source.driver_error import driver_errors
from tailrace.read.source.uri import redact_repr
from tailrace.watch.client.arguments import Arguments, Unshown
from tailrace.watch.client.request import WatchRequest, watch_codec_options


class Watchable:
    """What can be watched. ``_Client`` is the class of its client."""

    def _watched_scope(self) -> Scope:
        raise NotImplementedError

    def _watched_client(self) -> Any:
        raise NotImplementedError

    def _request(self, *, document_class: Any, codec_options: Any, pipeline: Any, **parameters: Any) -> WatchRequest:
        """What a ``watch`` with these parameters asks for. Raises as ``watch`` does if they are not valid."""
        target = cast(Any, self)
        with driver_errors():
            return WatchRequest(
                scope=self._watched_scope(),
                codec_options=watch_codec_options(target.codec_options, codec_options, document_class),
                pipeline=[] if pipeline is None else pipeline,
                read_preference=target.read_preference,
                target=target,
                client=self._watched_client(),
                **parameters,
            )


class WatchableClient(Watchable):
    """A client whose ``repr`` and errors show no secret."""

    def _construct(self, arguments: Arguments, make: Callable[..., None], **named: Any) -> None:
        """Call PyMongo's constructor."""
        arguments.construct(make, **named)
        for name in ("_init_kwargs", "_resolve_srv_info"):
            if isinstance(vars(self).get(name), dict):
                setattr(self, name, Unshown(vars(self)[name]))

    def __repr__(self) -> str:
        try:
            return redact_repr(super().__repr__())
        except (AttributeError, KeyError):  # its constructor has failed, and a traceback shows what there is
            return f"{type(self).__name__}(...)"

    def _watched_scope(self) -> Scope:
        return Scope.cluster()

    def _watched_client(self) -> Any:
        return self


class WatchableDatabase(Watchable):
    """A database."""

    client: Any
    name: Any

    @classmethod
    def _of(cls, theirs: Any) -> Self:
        """PyMongo's database as one of ours."""
        options = (theirs.codec_options, theirs.read_preference, theirs.write_concern, theirs.read_concern)
        return cast(Any, cls)(theirs.client, theirs.name, *options)  # type: ignore[no-any-return]

    def _watched_scope(self) -> Scope:
        return Scope.of_database(self.name)

    def _watched_client(self) -> Any:
        return self.client


class WatchableCollection(Watchable):
    """A collection."""

    database: Any
    name: Any

    @classmethod
    def _of(cls, database: Any, theirs: Any) -> Self:
        """PyMongo's collection as one of ours."""
        options = (theirs.codec_options, theirs.read_preference, theirs.write_concern, theirs.read_concern)
        return cast(Any, cls)(database, theirs.name, False, *options)  # type: ignore[no-any-return]

    def _watched_scope(self) -> Scope:
        return Scope.of_collection(self.database.name, self.name)

    def _watched_client(self) -> Any:
        return self.database.client
