"""Which replica sets a deployment is made of: one, or a config server and shards (docs/how-to/sharded-clusters.md).

A cluster is named by its config server's replica set, by a mongos, or by the list of its shards. Shards are listed in
``config.shards`` as ``<replica set>/<host:port>,...``; everything else of the connection (user, TLS, time-outs) is
taken from the URI that named the cluster. If the URI names one shard's replica set, that shard is read alone.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_plus

import bson
from bson.codec_options import CodecOptions
from pymongo import MongoClient, ReadPreference
from pymongo.collection import Collection
from pymongo.errors import PyMongoError
from pymongo.uri_parser import parse_uri

from tailrace.base.threads import CheckedThread
from tailrace.core.oplog.cluster_clock import ClusterClock
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.plan.profile import profile_for
from tailrace.errors import SourceError, TailraceError, UsageError, on_shard
from tailrace.read.source.compatibility import server_version
from tailrace.read.source.connection import Connection, clock_session, majority_after, open_client
from tailrace.read.source.failure import seed_names, source_error
from tailrace.read.source.uri import ClientOptions, ConnectionString, hide

#: Options that say which servers to talk to: they are the shard's own.
_OF_THE_SEEDS: Final = frozenset({"replicaset", "directconnection", "loadbalanced", "srvservicename", "srvmaxhosts"})
#: Options of how documents are decoded: ours are read as they are.
_OF_DECODING: Final = frozenset(
    {"document_class", "tz_aware", "tzinfo", "type_registry", "datetime_conversion", "unicode_decode_error_handler"}
)
#: Names of databases and collections may hold bytes that are not UTF-8: those become surrogates.
_PLAIN: Final[CodecOptions[dict[str, Any]]] = CodecOptions(unicode_decode_error_handler="surrogateescape")
_CONFIG_SERVER: Final = 2
#: A removed shard has no databases: the second read finds where they are. More than that is never seen.
_PRIMARY_TRIES: Final = 5


class ShardAddress(NamedTuple):
    """A shard: its ``_id`` in ``config.shards``, and where it is: ``<replica set>/<host:port>,...``."""

    name: str
    host: str


@dataclass(frozen=True)
class OpenView:
    """The cluster at the moment a stream is opened.

    ``time``          a cluster time that every member has heard of: a write acknowledged later is later
    ``config_after``  follow ``config.shards`` after this time; ``None`` where the shards are a fixed list
    ``shards``        names, in the order of ``config.shards``
    """

    time: ClusterTime
    config_after: ClusterTime | None
    shards: tuple[str, ...]


def shard_uri(uri: str, host: str) -> str:
    """``uri`` with the servers of a shard (``host`` as in ``config.shards``) in place of its own.

    User, password, database and options stay as they are written there, but for those that name servers. Raises
    UsageError where ``host`` does not have that form; the message holds no secret.
    """
    name, slash, members = host.partition("/")
    if not (name and slash and members):
        raise UsageError(f"{host!r} is not <replica set>/<host:port>,... as in config.shards")
    scheme, _, rest = uri.partition("://")
    authority, _, tail = rest.partition("/")
    if "?" in authority:  # mongodb://host?option=value
        authority, _, query = authority.partition("?")
        tail = f"?{query}"
    user, at, _ = authority.rpartition("@")
    database, _, query = tail.partition("?")
    options = [option for option in re.split("[&;]", query) if option and _option_name(option) not in _OF_THE_SEEDS]
    if scheme == "mongodb+srv":
        options += _srv_options(uri, {_option_name(option) for option in options})
    options.append(f"replicaSet={name}")
    return f"mongodb://{user}{at}{members}/{database}?{'&'.join(options)}"


def _option_name(option: str) -> str:
    return unquote_plus(option.partition("=")[0]).lower()


def _srv_options(uri: str, given: set[str]) -> list[str]:
    """What a mongodb+srv:// URI means in addition to what it says: TLS, and the options of its TXT record."""
    options = [] if given & {"tls", "ssl"} else ["tls=true"]
    source = parse_uri(uri)["options"].get("authSource")
    if source and "authsource" not in given:
        options.append(f"authSource={source}")
    return options


def config_server_of(shard_map: Mapping[str, Any], who: str) -> str:
    """The config server's ``<replica set>/<host:port>,...`` in a member's answer to ``getShardMap``."""
    host = (shard_map.get("map") or {}).get("config")
    if not isinstance(host, str) or "/" not in host:
        raise SourceError(f"{who} does not say where its config server is", hint="Connect to the config server")
    return host


class Cluster:
    """A sharded cluster: a client for its config server and one for each shard, made when they are first needed.

    ``config``  the config server's client; ``None`` where the cluster was given as a fixed list of shards

    May be used from several threads. ``close`` closes the clients that were made here.
    """

    def __init__(
        self,
        uri: str | ConnectionString,
        options: Mapping[str, Any],
        *,
        config: MongoClient[Any] | None = None,
        fixed: Mapping[str, MongoClient[Any]] | None = None,
    ) -> None:
        self.config = config
        self._uri = hide(uri)
        self._options = ClientOptions(
            {name: value for name, value in options.items() if name.lower() not in _OF_DECODING}
        )
        for name in list(self._options):
            if name.lower() in _OF_THE_SEEDS:
                del self._options[name]
        self._fixed = dict(fixed or {})
        self._clients: dict[ShardAddress, MongoClient[Any]] = {}
        self._owned: list[MongoClient[Any]] = []
        self._names: dict[str, MongoClient[Any]] = dict(self._fixed)
        self._found_config: MongoClient[Any] | None = None
        self._lock = threading.Lock()

    # -- finding out ------------------------------------------------------------------------------------------------

    @classmethod
    def discover(
        cls, client: MongoClient[Any], uri: str | ConnectionString, options: Mapping[str, Any]
    ) -> Cluster | None:
        """The cluster that ``client``, opened on ``uri`` with PyMongo's ``options``, is connected to; ``None`` for a
        replica set that is not a config server. Raises SourceError where it cannot be reached."""
        try:
            hello = client.admin.command("hello", read_preference=client.read_preference)
            if hello.get("configsvr") == _CONFIG_SERVER:
                return cls(uri, options, config=client)
            if hello.get("msg") != "isdbgrid":
                return None
            # A mongos has no oplog: what it knows of its config server is enough.
            host = config_server_of(client.admin.command("getShardMap"), f"the mongos {seed_names(client)}")
        except PyMongoError as error:
            raise source_error(error, client) from None
        found = cls(uri, options)
        found.config = found._opened(host)
        return found

    @classmethod
    def of_shards(cls, uris: Sequence[str | ConnectionString], options: Mapping[str, Any]) -> Cluster:
        """The shards at ``uris``, each a replica set, and no others: none that is added later. Connects."""
        found = cls(uris[0] if uris else "", options)
        try:
            for uri in uris:
                client = open_client(uri, **options)
                found._owned.append(client)
                name = Connection(client).name
                if name in found._fixed:
                    raise UsageError(f"two of the URIs name the replica set {name}", hint="Give each shard once")
                found._fixed[name] = client
            if not found._fixed:
                raise UsageError("the list of shards is empty", hint="Give the URI of each shard")
        except BaseException:
            found.close()
            raise
        found._names = dict(found._fixed)
        return found

    # -- its parts --------------------------------------------------------------------------------------------------

    def client(self, name: str) -> MongoClient[Any]:
        """The client of a shard that ``shards`` has named."""
        with self._lock:
            found = self._names.get(name)
        if found is None:
            raise SourceError(f"the cluster has no shard {name}")
        return found

    @property
    def clients(self) -> list[MongoClient[Any]]:
        """The config server's client if it is known, and those of the shards that are."""
        with self._lock:
            named = [*self._names.values()]
        return named if self.config is None else [self.config, *named]

    def client_at(self, shard: ShardAddress) -> MongoClient[Any]:
        """The client of a present or former shard, made now if there is none yet. Does not connect."""
        with self._lock:
            client = self._clients.get(shard)
            if client is None:
                client = self._clients[shard] = self._opened(shard.host)
            return client

    def current_client(self, name: str, config: Connection | None = None) -> MongoClient[Any] | None:
        """The client of the shard that bears the name now, as ``config.shards`` says; ``None`` where none does.

        The list of shards that this process read before does not know a shard that was added since, nor that a name now
        belongs to other servers. Of a fixed list of shards, those in it are not asked about. ``config`` is a connection
        to ``config_client`` that the caller has already.
        """
        if name in self._fixed:
            return self._fixed[name]
        connection = config or Connection(self.config_client())
        read = self.config_collection("shards").find_one
        document = connection.retrying(lambda: read({"_id": name}, {"host": 1}))
        return None if document is None else self.client_at(ShardAddress(name, str(document["host"])))

    def primary_client(self, database: str) -> MongoClient[Any] | None:
        """The client of a database's primary shard, as ``config.databases`` says now; ``None`` where there is no such
        database. Raises SourceError where its shard is not found either when both are asked again.

        A shard that was removed between the two reads has handed its databases on before."""
        connection = Connection(self.config_client())
        read = self.config_collection("databases").find_one
        name = ""
        for _ in range(_PRIMARY_TRIES):
            document = connection.retrying(lambda: read({"_id": database}, {"primary": 1}))
            if document is None:
                return None
            name = str(document["primary"])
            client = self.current_client(name, connection)
            if client is not None:
                return client
        raise SourceError(
            f"the cluster has no shard {name}, the primary shard of {database}",
            hint="Try again when the cluster is no longer changing",
        )

    def _opened(self, host: str) -> MongoClient[Any]:
        client = open_client(hide(shard_uri(self._uri.reveal(), host)), **self._options)
        self._owned.append(client)
        return client

    def shards(self, *, after: ClusterTime | None = None) -> list[ShardAddress]:
        """The shards in ``config.shards``, read again at majority, everything up to ``after`` included."""
        if self.config is None:
            return [ShardAddress(name, "") for name in self._fixed]
        connection = Connection(self.config)

        def read() -> list[ShardAddress]:
            found = self.config_collection("shards", after=after).find({}, {"host": 1}, sort=[("_id", 1)])
            return [ShardAddress(str(shard["_id"]), str(shard["host"])) for shard in found]

        shards = connection.retrying(read)
        clients = {shard.name: self.client_at(shard) for shard in shards}
        with self._lock:
            self._names.update(clients)
        return shards

    def config_client(self) -> MongoClient[Any]:
        """The config server's client. With a fixed list of shards one of them is asked for it, once."""
        with self._lock:
            if self.config is not None:
                return self.config
            if self._found_config is None:
                name, client = next(iter(self._fixed.items()))
                try:
                    host = client.admin.command("shardingState").get("configServer")
                except PyMongoError as error:
                    raise on_shard(source_error(error, client), name) from None
                if not host:
                    raise SourceError(f"the replica set {name} is not a shard of a cluster")
                self._found_config = self._opened(str(host))
            return self._found_config

    def config_collection(self, name: str, *, after: ClusterTime | None = None) -> Collection[Any]:
        """A collection of the config database, decoded plainly, read at majority from the primary: on a secondary that
        lags, a chunk would still be where it was. ``after`` as for ``Connection.majority``."""
        concern = majority_after(after)
        database = self.config_client().get_database(
            "config", codec_options=_PLAIN, read_concern=concern, read_preference=ReadPreference.PRIMARY
        )
        return database.get_collection(name)

    def server_version(self) -> str:
        """The lowest version of any shard, and of those with it the lowest feature compatibility version: what a stream
        over all of them can rely on."""
        versions = []
        for shard in self.shards():
            with _naming(shard.name):
                versions.append(server_version(Connection(self.client(shard.name))))
        if not versions:
            raise SourceError("the cluster has no shard yet", hint="Add one: sh.addShard('<replica set>/<host:port>')")
        return min(versions, key=lambda version: profile_for(version).rank)

    # -- the clock --------------------------------------------------------------------------------------------------

    def open_view(self) -> OpenView:
        """The shards, and a cluster time that all of them have heard of.

        The config server's time is taken before its shards are read, so that none is added between the two unseen.
        """
        clock = ClusterClock()
        config_after = None
        if self.config is not None:
            config_after = _ping(self.config, clock)
        shards = self.shards(after=config_after)
        reached: dict[str, ClusterTime] = {}
        time = clock.now
        for is_second in (False, True):
            for shard in shards:
                if not is_second or reached[shard.name] < time:
                    with _naming(shard.name):
                        _ping(self.client(shard.name), clock)
                    reached[shard.name] = clock.now
            if not is_second:
                # What a busy shard says in the second round is news to those before it: it is too late to count.
                time = clock.now
        return OpenView(time, config_after, tuple(shard.name for shard in shards))

    def close(self) -> None:
        """Close the clients that were made here."""
        for client in self._owned:
            if client.topology_description.has_readable_server():
                client.close()
            else:  # it would look for a server for seconds, to tell it that its sessions have ended
                CheckedThread(client.close, "tailrace-close").start()


@contextmanager
def _naming(shard: str) -> Iterator[None]:
    """Errors inside name the shard."""
    try:
        yield
    except TailraceError as error:
        raise on_shard(error, shard) from None


def _ping(client: MongoClient[Any], clock: ClusterClock) -> ClusterTime:
    """Tell a replica set of the clock's time, take over its own, and give what its member has applied."""
    connection = Connection(client)

    def ping() -> ClusterTime:
        with clock_session(client, None if clock.document is None else bson.decode(clock.document)) as session:
            reply = client.admin.command("ping", session=session, read_preference=client.read_preference)
            if session.cluster_time is not None:
                clock.gossip(bson.encode(session.cluster_time))
            return ClusterTime.from_timestamp(reply["operationTime"])

    time = connection.retrying(ping)
    clock.advance(time)
    return time
