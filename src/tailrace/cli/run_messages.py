"""The messages that ``tailrace run`` publishes: the section ``messages`` of the pipeline file."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, TextIO

from tailrace.base.health import HUNG_AFTER_S, Health, whole
from tailrace.base.threads import CheckedThread
from tailrace.cli.handler_argument import store_namespace
from tailrace.cli.output import tell
from tailrace.cli.stopped_by_signals import stopped_by_signals
from tailrace.core.masking.events import without_values
from tailrace.errors import ChangeStreamHistoryLost, InternalError, SinkError, TailraceError, UsageError
from tailrace.read.source.uri import hide, redact_uri

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from tailrace.act.consumer.dead_letters import DeadLetters
    from tailrace.act.consumer.listener import Listener
    from tailrace.act.consumer.messages.debezium import RecordConverter
    from tailrace.act.consumer.messages.making import RawChange
    from tailrace.act.consumer.messages.publisher import Made, Publisher
    from tailrace.act.consumer.messages.relay import MessageRelay
    from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore
    from tailrace.core.oplog.cluster_time import ClusterTime
    from tailrace.lake.spark.store.message_settings import MessageSettings
    from tailrace.watch.client.client import Client

#: How often it is asked whether the present is reached.
_LOOK_S: Final = 0.2
#: In a run that ends at the present, a quiet stream's position is written forward this often.
_IDLE_ONCE_S: Final = 0.5
#: A relay that waits for its broker does not hang.
_MARGIN_S: Final = 60.0
_HISTORY_HINT: Final = (
    "onHistoryLost: snapshot publishes the documents again; gap goes on at the oldest entry and notes what is missing"
)
#: What Kafka forbids in a topic's name.
_NOT_IN_TOPICS: Final = re.compile(r"[^A-Za-z0-9._-]")
#: In place of a collection's name: of a change that has none, such as dropDatabase.
_NONE: Final = "_"


@contextmanager
def _said_of(settings: MessageSettings) -> Iterator[None]:
    """An error names the entry in the file, and for a missing package its extra."""
    extras = {"confluent_kafka": "kafka", "redis": "redis", "nats": "nats"}
    try:
        yield
    except ImportError as error:
        extra = "schema-registry" if settings.registry else extras.get(str(error.name).partition(".")[0])
        raise UsageError(
            f"messages.{settings.name} needs a package that is not installed: {error.name}",
            hint=None if extra is None else f"Install it: pip install 'tailrace[{extra}]'",
        ) from None
    except UsageError as error:
        raise UsageError(f"messages.{settings.name}: {redact_uri(error.message)}", hint=error.hint) from None


def publisher_of(settings: MessageSettings) -> Publisher:
    """The broker's publisher. Raises UsageError."""
    config = dict(settings.config)
    with _said_of(settings):
        if settings.broker == "kafka":
            from tailrace.act.consumer.messages.kafka import KafkaPublisher  # noqa: PLC0415  an extra each

            return KafkaPublisher(settings.to.partition("://")[2], config)
        if settings.broker == "redis":
            from tailrace.act.consumer.messages.redis_streams import RedisPublisher  # noqa: PLC0415

            length, replicas = config.get("maxLength"), config.get("replicas", 0)
            return RedisPublisher(settings.to, length_max=length, replicas=replicas)
        from tailrace.act.consumer.messages.nats_jetstream import NatsPublisher  # noqa: PLC0415

        own = {"user_credentials": config["credentials"]} if "credentials" in config else {}
        return NatsPublisher(settings.to, **own)


def maker_of(settings: MessageSettings) -> Callable[[RawChange], Made]:
    """What makes the messages of a change. Raises UsageError."""
    from tailrace.act.consumer.messages.debezium import DebeziumMessages  # noqa: PLC0415
    from tailrace.act.consumer.messages.making import ChangeMessages  # noqa: PLC0415

    masks: Any = settings.masks
    cloud: Any = settings.cloud_events
    with _said_of(settings):
        if masks is not None:
            _ = masks.compiled  # a key that is missing is reported before anything runs
        if settings.form == "debezium":
            return DebeziumMessages(
                settings.topic,
                converter=_converter_of(settings),
                tombstones=settings.tombstones,
                cloud_events=cloud,
                masks=masks,
            )
        body: Any = settings.form
        return ChangeMessages(_topic_of(settings.topic), body=body, cloud_events=cloud, masks=masks)


def _converter_of(settings: MessageSettings) -> RecordConverter:
    if settings.registry:
        from tailrace.act.consumer.messages.schema_registry import (  # noqa: PLC0415  of extras only
            AvroConverter,
            ProtobufConverter,
        )

        return (AvroConverter if settings.converter == "avro" else ProtobufConverter)(settings.registry)
    from tailrace.act.consumer.messages.debezium import JsonConverter  # noqa: PLC0415

    return JsonConverter(schemas=settings.converter == "jsonWithSchemas")


def _topic_of(template: str) -> str | Callable[[Mapping[str, Any]], str]:
    if "{" not in template:
        return template

    def topic(event: Mapping[str, Any]) -> str:
        names = event.get("ns") or {}
        found = {key: _NOT_IN_TOPICS.sub("_", str(names.get(part, _NONE))) for key, part in _PLACES.items()}
        return template.format(**found)

    return topic


_PLACES: Final = {"database": "db", "collection": "coll"}


def watched_stages(settings: MessageSettings) -> list[Mapping[str, Any]]:
    """The stages of the stream over the deployment: those that choose the collections, and the user's."""
    match = settings.selection.match
    return [*([] if match is None else [{"$match": match}]), *settings.pipeline]


class MessageStream:
    """One entry of the section: a listener in a thread, with a lease and a position of its own."""

    def __init__(
        self, settings: MessageSettings, client: Client[Any], keeper: Client[Any], *, once: bool, told: TextIO | None
    ) -> None:
        from tailrace.act.consumer.listener import Listener  # noqa: PLC0415  so that --help does not load it
        from tailrace.act.consumer.rules.commit_policy import IDLE_S  # noqa: PLC0415

        self.settings = settings
        self.client = client
        database, collection = store_namespace(settings.store)
        self.store: MongoLeaseStore = _leases(keeper[database][collection], settings, told)
        maker = maker_of(settings)
        self._publisher = publisher_of(settings)
        self.published = 0
        relay = self._relay(maker)
        watch: dict[str, Any] = {**settings.watch}
        start: Any = settings.start
        watched: Any = client
        lost: Any = settings.on_history_lost
        try:
            self.listener: Listener = Listener(
                watched,
                relay,
                resource=settings.resource,
                store=self.store,
                partitions=settings.partitions,
                lane_key=settings.lane_key,
                commit_every=settings.commit_every,
                commit_idle=_IDLE_ONCE_S if once else IDLE_S,
                start=start,
                on_history_lost=lost,
                on_error="stop" if settings.letters is None else _letters(keeper, settings),
                retries=0 if settings.letters is not None else settings.retries,
                lease_seconds=settings.lease_s,
                pipeline=watched_stages(settings),
                **watch,
            )
        except UsageError as error:
            self._publisher.close()
            raise UsageError(f"messages.{settings.name}: {error.message}", hint=error.hint) from None
        self._thread: CheckedThread | None = None

    def _relay(self, maker: Callable[[RawChange], Made]) -> MessageRelay:
        """The listener's handler, which counts: the statistics of a listener leave out what is copied before lanes."""
        from tailrace.act.consumer.messages.relay import MessageRelay  # noqa: PLC0415  as in __init__

        stream, lock = self, threading.Lock()

        class CountingRelay(MessageRelay):
            """Counts changes whose messages are stored."""

            def handle_batch(self, changes: Sequence[Any]) -> int:
                done = super().handle_batch(changes)
                with lock:
                    stream.published += done
                return done

        return CountingRelay(self._publisher, maker, retry_seconds=self.settings.broker_s)

    def start(self, failed: Callable[[TailraceError], None]) -> None:
        """Begin. ``failed`` is called in the thread with what ends it."""
        self._thread = CheckedThread(self.listener.run, f"tailrace-messages-{self.settings.name}", failed=failed)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def failure(self) -> TailraceError | None:
        """What has ended it, said of the entry in the file."""
        error = None if self._thread is None else self._thread.failure
        if error is None:
            return None
        return said_of_entry(error, self.settings)

    def has_reached(self, until: ClusterTime) -> bool:
        """Whether everything up to ``until`` is published and committed, whichever process has done it."""
        from tailrace.act.consumer.rules.errors import LeaseStoreUnavailable  # noqa: PLC0415  as in __init__
        from tailrace.act.consumer.standing import has_reached  # noqa: PLC0415

        try:
            return has_reached(self.store, self.settings.resource, until)
        except LeaseStoreUnavailable:
            return False  # it is asked again

    def close(self) -> None:
        """Finish what is in hand, commit, give the lease back, and close the broker's connection."""
        self.listener.stop()
        if self._thread is not None:
            self._thread.join()
        self._publisher.close()


def said_of_entry(error: TailraceError, settings: MessageSettings) -> TailraceError:
    """What has ended a listener, in the words of the file. There is no handler of the user's here."""
    from tailrace.act.consumer.rules.errors import HandlerFailed  # noqa: PLC0415  as in MessageStream

    cause = error.__cause__
    found = cause if isinstance(error, HandlerFailed) and isinstance(cause, TailraceError) else error
    if isinstance(found, InternalError):
        return found
    if settings.masks is not None:
        found = without_values(found)
    hint = _HISTORY_HINT if isinstance(found, ChangeStreamHistoryLost) else found.hint
    said = SinkError(f"messages.{settings.name}: {found.message}", code=found.code, hint=hint)
    said.__cause__ = error
    return said


def _letters(keeper: Client[Any], settings: MessageSettings) -> DeadLetters:
    from tailrace.act.consumer.dead_letters import DeadLetters  # noqa: PLC0415  as in MessageStream

    class HiddenReasons(DeadLetters):
        """The server's words may quote a value, and go to the log."""

        def __call__(self, change: Any, error: Exception, attempt: int) -> Any:
            hidden = without_values(error) if isinstance(error, TailraceError) else error
            return super().__call__(change, hidden, attempt)

    assert settings.letters is not None
    database, collection = store_namespace(settings.letters)
    kind = DeadLetters if settings.masks is None else HiddenReasons
    then: Any = settings.after_letter
    return kind(keeper[database][collection], tries=settings.retries + 1, then=then)


def _leases(collection: Any, settings: MessageSettings, told: TextIO | None) -> MongoLeaseStore:
    from tailrace.act.consumer.mongo_lease_store import MongoLeaseStore  # noqa: PLC0415  as in MessageStream

    class ToldLeases(MongoLeaseStore):
        """Says once that another process has the lease: nothing is published here meanwhile."""

        is_told = settings.partitions > 1  # lanes are shared with other processes

        def acquire(self, resource: str, owner: str, seconds: float) -> Any:
            lease = super().acquire(resource, owner, seconds)
            if lease is None and not self.is_told:
                self.is_told = True
                said = f"messages.{settings.name}: another process holds the lease '{resource}': this run stands by"
                tell(f"tailrace: {said}", stream=told)
            return lease

    return ToldLeases(collection)


class MessageStreams:
    """All entries, while they run."""

    def __init__(self, streams: Sequence[MessageStream]) -> None:
        self.streams = streams

    @contextmanager
    def watched_over(self) -> Iterator[tuple[Collector, Callable[[], Health]]]:
        """Looks after them while the body runs: their statistics, and how they are doing."""
        from tailrace.act.consumer.metrics import ListenerCollector  # noqa: PLC0415  not without prometheus_client
        from tailrace.act.consumer.rules.health import HealthLimits  # noqa: PLC0415
        from tailrace.act.consumer.standing import Standing  # noqa: PLC0415

        with ExitStack() as stack:
            standings: dict[int, Standing] = {}
            for one in self.streams:
                limits = HealthLimits(max(HUNG_AFTER_S, one.settings.broker_s + _MARGIN_S))
                standing = Standing([one.listener], one.client, one.store, limits=limits)
                standings[id(one.listener)] = stack.enter_context(standing)
            listeners = [one.listener for one in self.streams]
            collector = ListenerCollector(listeners, lambda listener: standings[id(listener)].lag(listener))
            yield collector, lambda: whole(standing.health() for standing in standings.values())


@contextmanager
def messaging(
    uri: str,
    entries: Sequence[MessageSettings],
    stop: threading.Event,
    *,
    once: bool,
    archive: str | None = None,
    told: TextIO | None = None,
) -> Iterator[MessageStreams]:
    """Publish messages in threads while the body runs; yields those that do it. What ends a thread, whatever it is,
    sets ``stop`` and is raised at the end. With ``once`` everything is published that was there when the body began.
    ``archive``: a directory with what the oplog no longer holds. ``told``: where messages for people go."""
    if not entries:
        yield MessageStreams(())
        return
    from tailrace.watch.client.client import connect, operation_time  # noqa: PLC0415  as in MessageStream

    with ExitStack() as stack:
        client = stack.enter_context(connect(hide(uri).reveal(), archive=archive))
        keepers: dict[str | None, Client[Any]] = {None: client}
        streams: list[MessageStream] = []
        for settings in entries:
            if settings.store_uri not in keepers:
                keepers[settings.store_uri] = stack.enter_context(connect(settings.store_uri))
            stream = MessageStream(settings, client, keepers[settings.store_uri], once=once, told=told)
            stack.callback(stream.close)
            streams.append(stream)
        until = _present(client, operation_time) if once else None
        stack.enter_context(_told_warnings(told))
        for stream in streams:
            stream.start(lambda _: stop.set())
        try:
            yield MessageStreams(streams)
        except BaseException:
            stop.set()
            raise
        finally:
            _end(streams, stop, until)
        for stream in streams:
            said = f"{stream.published:,} changes became messages of {stream.settings.name}"
            tell(said, stream=told)
    raise_failure(streams)


def raise_failure(streams: Sequence[MessageStream]) -> None:
    """Raise what has ended one of them."""
    for stream in streams:
        if stream.failure is not None:
            raise stream.failure


def _present(client: Client[Any], operation_time: Callable[[Client[Any]], ClusterTime]) -> ClusterTime:
    from tailrace.read.source.driver_error import driver_errors  # noqa: PLC0415  as in MessageStream

    with driver_errors():
        return operation_time(client)


def _end(streams: Sequence[MessageStream], stop: threading.Event, until: ClusterTime | None) -> None:
    """Stop all of them: those of a run that ends at the present ``until``, each when it is there."""
    waiting = [] if until is None else list(streams)
    with stopped_by_signals(stop):
        while waiting and not stop.is_set():
            waiting = [one for one in waiting if one.is_running and until is not None and not one.has_reached(until)]
            if waiting:
                stop.wait(_LOOK_S)
        for one in streams:
            one.listener.stop()
        for one in streams:
            one.close()


class _ToldWarnings(logging.Handler):
    """Lines of the log for people: standard error itself goes to Spark's log meanwhile."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(logging.WARNING)
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        tell(f"tailrace: {redact_uri(record.getMessage())}", stream=self._stream)


@contextmanager
def _told_warnings(stream: TextIO | None) -> Iterator[None]:
    """Let people hear what listeners log, such as that a broker is away."""
    if stream is None:
        yield
        return
    log, handler = logging.getLogger("tailrace.consumer"), _ToldWarnings(stream)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
