"""The way to one replica set: a PyMongo client, what kind of deployment answers, and reads that are tried again."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient, ReadPreference
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.command_cursor import CommandCursor
from pymongo.database import Database
from pymongo.errors import ConnectionFailure, InvalidName, PyMongoError
from pymongo.read_concern import ReadConcern

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.errors import SourceError, UsageError
from tailrace.read.source.failure import Backoff, describe_members, is_transient, seed_names, source_error
from tailrace.read.source.time_limit import check_time_limit, remaining_s
from tailrace.read.source.uri import ClientOptions, ConnectionString, hide, parse_complaint, redact_repr, without_scheme

APP_NAME: Final = "tailrace"
SERVER_SELECTION_TIMEOUT_MS: Final = 10_000
#: A member that hangs without closing its connection is given up after this time; no read of ours waits longer.
SOCKET_TIMEOUT_MS: Final = 60_000
RETRY_SECONDS: Final = 120.0

MAJORITY: Final = ReadConcern("majority")


def majority_after(after: ClusterTime | None) -> ReadConcern:
    """Majority, once everything up to ``after`` is committed (``None`` and 0: as it is now)."""
    return _MajorityAfter(after) if after else MAJORITY  # the server rejects a null timestamp


class _MajorityAfter(ReadConcern):
    """Majority, once everything up to a time is committed. A causally consistent session would ask the same of the
    server, but PyMongo refuses explicit sessions to a client that is connected to a hidden member alone: that member
    says in its hello that it has sessions, and is not counted among those that can be read."""

    def __init__(self, after: ClusterTime) -> None:
        super().__init__("majority")
        self._after = after.to_timestamp()

    @property
    def document(self) -> dict[str, Any]:
        """As it is sent."""
        return {**super().document, "afterClusterTime": self._after}


@contextmanager
def clock_session(client: MongoClient[Any], clock: Mapping[str, Any] | None = None) -> Iterator[ClientSession]:
    """A session by which a member learns of a ``clock`` (a ``$clusterTime`` as another has sent it) and tells its own.

    PyMongo refuses an explicit session where ``_MajorityAfter`` says. One that it has made on its own, it leaves out of
    the command there, and sends the clock all the same: so this one counts as such. PyMongo has no public way.
    """
    with client.start_session(causal_consistency=False) as session:
        session._implicit = True
        if clock is not None:
            session.advance_cluster_time(clock)
        yield session


def collection_of(database: Database[Any], name: str) -> Collection[Any]:
    """A collection by the name that the server gave. It takes ``a..b`` and ``a.`` as names, for which PyMongo makes no
    object (measured on 6.0.27, 5.0.4 and 4.4.2): such a collection must not be derived from (``with_options``)."""
    try:
        return database.get_collection(name)
    except InvalidName:
        found: Any = database.get_collection("_")
        found._name, found._full_name = name, f"{database.name}.{name}"
        return cast(Collection[Any], found)


_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="surrogateescape"
)
_log = logging.getLogger("tailrace.source")
_T = TypeVar("_T")


#: What a parser says when a password stands in the URI as it is.
_UNESCAPED: Final = re.compile(r"escaped|[Pp]ort|database name|Empty host|IPv6")


class _Client(MongoClient[Any]):
    """PyMongo's, which shows the password of a certificate's key in its ``repr``; ours does not."""

    def __repr__(self) -> str:
        return redact_repr(super().__repr__())


_Client.__name__ = MongoClient.__name__  # PyMongo's texts name the class


#: How many connections a client that reads an oplog has at least to a member, whatever ``maxPoolSize`` says about the
#: program's own commands. The server pushes a shared read's replies over one of them for as long as it lasts, and the
#: wait for a shard's promise or a stream that reads for itself hold one for seconds: look-ups and new streams need
#: others.
CONNECTIONS_MIN: Final = 4
_POOL_SIZE: Final = "maxPoolSize"

#: Our defaults, where nobody says otherwise.
_DEFAULTS: Final[Mapping[str, Any]] = {
    "appname": APP_NAME,
    "serverSelectionTimeoutMS": SERVER_SELECTION_TIMEOUT_MS,
    "socketTimeoutMS": SOCKET_TIMEOUT_MS,
}


def _defaults(uri: ConnectionString, options: Mapping[str, Any]) -> dict[str, Any]:
    named = {name.lower() for name in (*options, *re.findall(r"[?&;]([^=&;]+)=", uri.reveal()))}
    return {name: value for name, value in _DEFAULTS.items() if name.lower() not in named}


def _pool(uri: ConnectionString, options: Mapping[str, Any]) -> dict[str, int]:
    """The option that enlarges a pool that is too small, by the name that the caller gave it; otherwise none."""
    name = next((name for name in options if name.lower() == _POOL_SIZE.lower()), None)
    in_uri = re.findall(rf"[?&;]{_POOL_SIZE}=([^&;]*)", uri.reveal(), re.IGNORECASE)
    try:
        size = int(options[name]) if name is not None else int(in_uri[-1])
    except (IndexError, TypeError, ValueError):
        return {}  # PyMongo's default, or PyMongo refuses it
    return {name or _POOL_SIZE: CONNECTIONS_MIN} if 0 < size < CONNECTIONS_MIN else {}  # 0: no limit


class Reader(_Client):
    """The connections that a client's streams read the oplog by. A caller that forgets to close the client is warned
    by the client, not by this class."""

    @classmethod
    def opened(cls, uri: ConnectionString, port: int | None, options: ClientOptions) -> Reader:
        """As ``open_client``, for arguments that a client was made of already. A member is waited for as long as by
        PyMongo's client (30 s): a stream's call raises then."""
        defaults = _defaults(uri, options)
        defaults.pop("serverSelectionTimeoutMS", None)
        return cls(uri.reveal(), port, **(defaults | options | _pool(uri, options)))

    def __del__(self) -> None:
        pass


Reader.__name__ = MongoClient.__name__


def open_client(uri: str | ConnectionString, **options: Any) -> MongoClient[dict[str, Any]]:
    """A PyMongo client for ``uri`` with our defaults where neither ``uri`` nor ``options`` (PyMongo's) say otherwise.

    Does not connect, but looks a mongodb+srv:// name up. Raises, without any secret, UsageError where the URI or an
    option cannot be used, SourceError where the name is not found.
    """
    if not isinstance(uri, (str, ConnectionString)):
        raise UsageError(f"the connection URI must be a string, not {type(uri).__name__}")
    uri, options = hide(uri), ClientOptions(options)  # what a traceback shows of this frame holds no secret
    if not re.match(r"mongodb(\+srv)?://", uri.reveal()):
        message, hint = without_scheme(uri.reveal())
        raise UsageError(message, hint=hint)
    if re.search(r"\s", uri.reveal().partition("://")[2].rpartition("@")[2].partition("/")[0]):
        raise unusable(None)  # PyMongo would take the half of a password for a host
    chosen = _defaults(uri, options)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            client: MongoClient[dict[str, Any]] = _Client(uri.reveal(), **(chosen | options | _pool(uri, options)))
    except (PyMongoError, ValueError, TypeError, KeyError, OSError) as error:
        raise unusable(parse_complaint(str(error), uri.reveal(), options)) from None
    for warning in warned:
        if issubclass(warning.category, ResourceWarning):
            continue  # of another client that went without close() at this moment
        _log.warning("connection URI: %s", _complaint(warning, uri, options) or "an option was not understood")
    return client


def _complaint(warning: warnings.WarningMessage, uri: ConnectionString, options: ClientOptions) -> str | None:
    return parse_complaint(str(warning.message), uri.reveal(), options)


def unusable(said: str | None) -> UsageError | SourceError:
    """The error for a URI or options that PyMongo does not take; ``said`` is its complaint without secrets."""
    if said is not None and "DNS" in said:
        return SourceError(
            f"the name in the mongodb+srv:// URI was not found: {said.rstrip('. ')}",
            hint="mongodb+srv:// needs an SRV record of that name in the DNS; a server is named by mongodb://host:27017",
        )
    if said is None or _UNESCAPED.search(said):
        return UsageError(
            "the connection URI does not parse" + (f": {said.partition('Hint:')[0].rstrip('. ')}" if said else ""),
            hint="In the name and the password of the user, @ is written as %40, : as %3A and / as %2F",
        )
    return UsageError(f"the connection URI or an option cannot be used: {said.rstrip('. ')}")


class Connection:
    """A replica set seen through one client. Reads go where the client's read preference says (default: the primary).

    Not for use by several threads at a time: a source belongs to its reader.
    """

    def __init__(
        self,
        client: str | ConnectionString | MongoClient[Any],
        *,
        retry_seconds: float = RETRY_SECONDS,
        waits: bool = True,
        options: Mapping[str, Any] = {},
    ) -> None:
        self._owned = isinstance(client, (str, ConnectionString))
        self.client: MongoClient[Any] = (
            open_client(client, **options) if isinstance(client, (str, ConnectionString)) else client
        )
        self._retry_seconds = retry_seconds
        #: Whether a member that cannot be reached is waited for, beyond what the client waits and tries on its own.
        self._waits = waits
        self._hello: Mapping[str, Any] | None = None
        #: The members and how each is, while none of them can be read.
        self.trouble: str | None = None
        #: Set from any thread: nothing is tried again.
        self.interrupted = False

    @property
    def hello(self) -> Mapping[str, Any]:
        """What the deployment says about itself; the first use connects. Raises SourceError where it is not a replica
        set that we can read."""
        if self._hello is None:
            try:
                self._hello = self._say_hello()
            except PyMongoError as error:
                raise source_error(error, self.client) from None
        return self._hello

    def wait_for_hello(self) -> None:
        """As ``hello``, but waits for a member, as long as reads are tried again."""
        backoff = self.new_backoff()
        while self._hello is None:
            try:
                self._hello = self._say_hello()
            except PyMongoError as error:
                check_time_limit(seed_names(self.client))
                self.endure(error, backoff, seed_names(self.client))
        self.trouble = None

    def _say_hello(self) -> Mapping[str, Any]:
        hello: Mapping[str, Any] = self.client.admin.command("hello", read_preference=self.client.read_preference)
        if hello.get("msg") == "isdbgrid":
            raise SourceError(
                f"{seed_names(self.client)} is a mongos, which keeps no oplog",
                hint="tailrace.connect() takes it and reads the shards; here, name one shard's replica set",
            )
        if "setName" not in hello:
            raise SourceError(
                f"{seed_names(self.client)} is a standalone server, which keeps no oplog",
                hint="Start mongod with --replSet and run rs.initiate(); one member is enough",
                code=40573,
            )
        return hello

    @property
    def name(self) -> str:
        """The replica set's name."""
        return str(self.hello["setName"])

    def majority(
        self,
        database: str,
        collection: str,
        *,
        after: ClusterTime | None = None,
        codec_options: CodecOptions[Any] | None = None,
    ) -> Collection[Any]:
        """The collection, to be read at majority, by a member that has majority-committed everything up to ``after``:
        a read waits for that. So a member that was just elected cannot answer from an older snapshot. ``after`` must be
        a time that the deployment has reached: the server rejects a future one."""
        there = self.client.get_database(database, codec_options=codec_options, read_concern=majority_after(after))
        return collection_of(there, collection)

    def raw_cursor(self, database: str, command: Mapping[str, Any], **options: Any) -> CommandCursor[RawBSONDocument]:
        """The documents of a command that gives a cursor, as they came. Names that PyMongo has no object for are taken,
        and what is no UTF-8 in a document becomes surrogates. PyMongo sends a session with the command and its getMores
        where it has one. ``options`` are those of ``Database.cursor_command``."""
        # The command's codec is not that of the getMores.
        there = self.client.get_database(database, codec_options=_RAW)
        return there.cursor_command(dict(command), codec_options=_RAW, **options)

    def retrying(self, read: Callable[[], _T]) -> _T:
        """The result of ``read``, tried again while the deployment may come back, for ``retry_seconds`` at most.

        Raises SourceError where waiting is over or cannot help.
        """
        name = self.name
        backoff = Backoff(give_up_s=self._retry_seconds)
        while True:
            try:
                result = read()
            except PyMongoError as error:
                check_time_limit(name)
                if isinstance(error, ConnectionFailure) and not self._waits:
                    raise source_error(error, self.client) from None
                self.endure(error, backoff, name)
            else:
                self.trouble = None
                return result

    def new_backoff(self, *, for_ever: bool = False) -> Backoff:
        return Backoff(give_up_s=None if for_ever else self._retry_seconds)

    def endure(self, error: PyMongoError, backoff: Backoff, what: str) -> None:
        """Wait after ``error`` so that ``what`` can be tried again; raises SourceError where waiting cannot help."""
        if error.timeout and remaining_s() is not None:
            return  # nothing is wrong with the deployment: the caller's own time is over
        if self.interrupted or not is_transient(error) or backoff.exhausted:
            raise source_error(error, self.client) from None
        self.trouble = describe_members(self.client)
        _log.warning("%s: waiting for a member to read from (%s)", what, self.trouble)
        _log.debug("%s: %s", what, type(error).__name__)
        backoff.wait()

    @property
    def reads_primary(self) -> bool:
        return bool(self.client.read_preference == ReadPreference.PRIMARY)

    def close(self) -> None:
        """Close the client, if it was made here."""
        if self._owned:
            self.client.close()
