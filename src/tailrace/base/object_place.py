"""A place in an object store, with as much of a path's behaviour as tables and archives need, and the two steps that
they rest on.

``create`` writes an object that must not be there yet (``If-None-Match: *``), ``swap`` one that must be what was read
(``If-Match``). For both, Google's store compares an object's generation, not its ETag (``x-goog-if-generation-match``).
Whichever of the two a store compares is called the object's tag here.

An answer may be lost after the store has done what was asked, and the library asks again: then the object exists, and
what it holds says whose it is. So a writer that is refused reads it back and compares. Two writers must never write the
same content in this way; ours names its writer.

What the store answers is repeated without the parts that may hold keys or signatures (``reason``).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeVar

from tailrace.errors import SinkError, UsageError

if TYPE_CHECKING:
    from obstore.store import AzureStore, GCSStore, S3Store

EXTRA: Final = "pip install 'tailrace[s3]'"
#: How help and errors write the URI of a place in a store.
URIS: Final = "s3://BUCKET/PREFIX, az://CONTAINER/PREFIX or gs://BUCKET/PREFIX"
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
#: A request is repeated for this long before the store counts as out of reach.
_RETRY: Final = timedelta(minutes=3)
#: Only the time counts: by default the libraries give up after ten retries, which take only seconds.
_REPEATED_MAX: Final = 100_000
_READ_AHEAD: Final = 1 << 20
#: A store may answer "conflict" where another request of ours was not finished.
_CONFLICTS_MAX: Final = 5
_CODE: Final = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
#: What stores say that have no room, or no more for their user: HTTP's status 507, and codes.
_NO_ROOM: Final = re.compile(r"Insufficient ?Storage|StorageFull|Quota ?Exceeded|no space left", re.IGNORECASE)
_FULL: Final = "The store has no room left. What was committed before is intact; make room there, and start again"
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_QUERY: Final = re.compile(r"\?\S+")

T = TypeVar("T")
Tag = Literal["e_tag", "version"]


@dataclass(frozen=True)
class ObjectScheme:
    """One kind of store.

    ``names``    the schemes of its URIs
    ``form``     a URI as an error shows it
    ``uri``      what a URI must match. Its group ``bucket`` is the bucket or container, ``prefix`` the rest
    ``root``     the URI of the bucket, of the groups of ``uri``
    ``keys``     what an error says about keys and endpoint
    ``opener``   the name of the class in ``obstore.store``
    ``always``   options that are set, whatever the user says
    ``renamed``  variables of the environment that the libraries do not read by the same name, and the option that each
                 of them is; the first one that is set counts
    ``suffixes`` whether it can be asked for the last bytes of an object whose size is not known
    ``tag``      what it compares before it replaces an object, as ``obstore`` names it: an ETag, or a generation
    """

    names: tuple[str, ...]
    form: str
    uri: re.Pattern[str]
    root: str
    keys: str
    opener: str
    always: Mapping[str, str]
    renamed: tuple[tuple[str, str], ...]
    suffixes: bool = True
    tag: Tag = "e_tag"

    def options(self, found: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
        """For ``obstore`` and ``deltalake`` alike. What the URI says goes before ``given``, and that before the
        environment."""
        options: dict[str, str] = {}
        for variable, option in self.renamed:
            if os.environ.get(variable):
                options.setdefault(option, os.environ[variable])
        account = found.get("account")
        return {**options, **given, **self.always, **({"azure_storage_account_name": account} if account else {})}

    def open(self, bucket: str, options: Mapping[str, str], retry: timedelta) -> Any:
        """The store's own object. Raises ImportError where there is no ``obstore``, and what that raises."""
        from obstore import store  # noqa: PLC0415  an extra

        repeated = {"retry_timeout": retry, "max_retries": _REPEATED_MAX}
        return getattr(store, self.opener)(bucket, config=dict(options), retry_config=repeated)


S3: Final = ObjectScheme(
    names=("s3", "s3a"),
    form="s3://BUCKET/PREFIX",
    uri=re.compile(r"s3a?://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(?P<prefix>.*))?", re.DOTALL),
    root="s3://{bucket}",
    keys="Keys and endpoint come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and the like",
    opener="S3Store",
    always={"aws_conditional_put": "etag"},
    renamed=(("AWS_ENDPOINT_URL_S3", "aws_endpoint"), ("AWS_ENDPOINT_URL", "aws_endpoint")),
)
_CONTAINER: Final = r"(?P<bucket>(?!-)(?!.*--)[a-z0-9-]{3,63}(?<!-))"
_AZURE_KEYS: Final = (
    "Account and keys come from AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN and "
    "the like"
)
_AZURE_RENAMED: Final = (  # the second of each two is what Azure's own command line reads
    ("AZURE_STORAGE_ACCOUNT_NAME", "azure_storage_account_name"),
    ("AZURE_STORAGE_ACCOUNT", "azure_storage_account_name"),
    ("AZURE_STORAGE_ACCOUNT_KEY", "azure_storage_account_key"),
    ("AZURE_STORAGE_KEY", "azure_storage_account_key"),
)
AZURE: Final = ObjectScheme(
    names=("az",),
    form="az://CONTAINER/PREFIX",
    uri=re.compile(rf"az://{_CONTAINER}(?:/(?P<prefix>.*))?", re.DOTALL),
    root="az://{bucket}",
    keys=_AZURE_KEYS,
    opener="AzureStore",
    always={},
    renamed=_AZURE_RENAMED,
    suffixes=False,
)
#: The same stores, by the name that Spark and Hadoop give them; the account is in the URI.
AZURE_WITH_ACCOUNT: Final = replace(
    AZURE,
    names=("abfss", "abfs"),
    form="abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX",
    uri=re.compile(
        rf"abfss?://{_CONTAINER}@(?P<account>[a-z0-9]{{3,24}})\.dfs\.core\.windows\.net(?:/(?P<prefix>.*))?", re.DOTALL
    ),
    root="abfss://{bucket}@{account}.dfs.core.windows.net",
)
GOOGLE: Final = ObjectScheme(
    names=("gs",),
    form="gs://BUCKET/PREFIX",
    uri=re.compile(r"gs://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])(?:/(?P<prefix>.*))?", re.DOTALL),
    root="gs://{bucket}",
    keys="Credentials come from GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT and the like",
    opener="GCSStore",
    always={},
    renamed=(),
    tag="version",
)
SCHEMES: Final = (S3, AZURE, AZURE_WITH_ACCOUNT, GOOGLE)
#: How the URIs of all of them begin.
BEGINNINGS: Final = tuple(f"{name}://" for scheme in SCHEMES for name in scheme.names)
#: What holds objects or files, and is refused.
_REFUSED: Final = {
    "gcs": "a place in Google Cloud Storage begins with gs://",
    **dict.fromkeys(("hdfs", "webhdfs", "viewfs"), "HDFS cannot replace a file on the condition that it is unchanged"),
    **dict.fromkeys(("wasb", "wasbs", "adl", "azure"), "a place in Azure begins with az:// or abfss://"),
}


def scheme_of(text: str) -> ObjectScheme | None:
    """The kind of store whose URI ``text`` is meant to be; ``None`` for anything else."""
    found = _SCHEME.match(text)
    return next((one for one in SCHEMES if found is not None and found[1] in one.names), None)


def check_tried(text: str) -> None:
    """Raises UsageError, which repeats nothing of it but its scheme, for the URI of a store that is known and that
    nobody has tried, or that cannot do what is needed."""
    found = _SCHEME.match(text)
    why = _REFUSED.get(found[1].lower()) if found is not None else None
    if found is not None and why is not None:
        raise UsageError(f"a URI that begins with '{found[1]}:' is refused: {why}", hint=f"Give a directory, {URIS}")


def match_of(scheme: ObjectScheme, uri: str) -> dict[str, str]:
    """The parts of a URI. Raises UsageError, which does not repeat the URI."""
    match = scheme.uri.fullmatch(uri)
    if match is None:
        raise UsageError(
            f"the URI of an object store must be {scheme.form}, without keys, port or options", hint=scheme.keys
        )
    return {name: value or "" for name, value in match.groupdict().items()}


class StoreAwayError(SinkError):
    """The object store could not be reached, or refused what was asked."""


class StoredObject(NamedTuple):
    """An object as a listing shows it: its name below what was listed, bytes, and when it was written,
    in seconds since 1970 by the store's clock."""

    name: str
    size: int
    modified: float


@dataclass(frozen=True, eq=False)
class ObjectBucket:
    """A bucket or container that was opened.

    ``name``     its URI
    ``options``  for ``obstore`` and ``deltalake`` alike; they may hold keys, so nothing prints them
    ``beside``   the local directory that belongs to what is kept there: state, lock, files on their way. Readers of an
                 archive need none
    """

    name: str
    store: S3Store | AzureStore | GCSStore = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    beside: Path
    #: By how many seconds the store's clock is ahead of ours, once that was measured.
    clock: list[float] = field(default_factory=list)
    #: As in ``ObjectScheme``.
    suffixes: bool = True
    tag: Tag = "e_tag"
    #: Not empty once the store was found to compare ETags without their quotes.
    bare: list[bool] = field(default_factory=list)

    def condition(self, tag: str) -> dict[str, str]:
        """The mode of a write that replaces the object if it has this tag. Ceph's gateway (16.2) compares the given tag
        with an ETag that has no quotes, so one in quotes, as every store returns it, never matches."""
        return {self.tag: tag.strip('"') if self.bare else tag}

    def tag_of(self, answer: Mapping[str, Any]) -> str:
        """The object's tag in what the store has answered; empty if it gave none."""
        return str(answer.get(self.tag) or "")


class ObjectPlace:
    """An object, or all objects whose keys begin with ``key`` and a slash, in ``bucket``."""

    def __init__(self, bucket: ObjectBucket, key: str) -> None:
        self.bucket = bucket
        self.key = key

    def __str__(self) -> str:
        return f"{self.bucket.name}/{self.key}".rstrip("/")

    def __repr__(self) -> str:
        return f"ObjectPlace({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectPlace) and str(other) == str(self)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> Self:
        return type(self)(self.bucket, f"{self.key}/{name}" if self.key else name)

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The place above."""
        return type(self)(self.bucket, self.key.rpartition("/")[0])

    def absolute(self) -> Self:
        """The same place: there are no relative ones."""
        return self

    def as_uri(self) -> str:
        """``s3://bucket/key``, or as its kind of store has it."""
        return str(self)

    # -- reading ----------------------------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """What the object holds. Raises FileNotFoundError."""
        return self.read()[0]

    def read(self) -> tuple[bytes, str]:
        """What the object holds, and its tag. Raises FileNotFoundError."""
        import obstore  # noqa: PLC0415  an extra

        def got() -> tuple[bytes, str]:
            answer = obstore.get(self.bucket.store, self.key)
            return bytes(answer.bytes()), self.bucket.tag_of(answer.meta)

        return self._asked("read", got)

    def head(self) -> tuple[int, str]:
        """The object's size in bytes, and its tag. Raises FileNotFoundError."""
        import obstore  # noqa: PLC0415

        found = self._asked("read", lambda: obstore.head(self.bucket.store, self.key))
        return found["size"], self.bucket.tag_of(found)

    def exists(self) -> bool:
        """Whether there is such an object."""
        try:
            self.head()
        except FileNotFoundError:
            return False
        return True

    def is_file(self) -> bool:
        """As ``exists``."""
        return self.exists()

    def is_dir(self) -> bool:
        """Whether there are objects below."""
        return next(self._listed(1), None) is not None

    def iterdir(self) -> Iterator[Self]:
        """The places right below, in the order of their names."""
        import obstore  # noqa: PLC0415

        listing = self._asked("list", lambda: obstore.list_with_delimiter(self.bucket.store, self.key or None))
        keys = {*listing["common_prefixes"], *(one["path"] for one in listing["objects"])}
        for key in sorted(keys - {self.key}):  # an empty object that a console makes to show a folder
            yield type(self)(self.bucket, key.rstrip("/"))

    def objects(self, after: str = "") -> Iterator[StoredObject]:
        """All objects below whose names sort after ``after``, in the order of their names."""
        first = len(self.key) + 1 if self.key else 0
        for one in self._listed(1000, after):
            yield StoredObject(one["path"][first:], one["size"], one["last_modified"].timestamp())

    def _listed(self, at_once: int, after: str = "") -> Iterator[Any]:
        import obstore  # noqa: PLC0415

        offset = (self / after).key if after else None
        stream = obstore.list(self.bucket.store, self.key or None, offset=offset, chunk_size=at_once)
        while True:
            found = self._asked("list", lambda: next(stream, None))
            if found is None:
                return
            yield from (one for one in found if one["path"] != self.key)  # as in ``iterdir``

    def end(self, size: int) -> tuple[bytes, int]:
        """The last ``size`` bytes of the object, or all of it, and its whole size. Raises FileNotFoundError."""
        import obstore  # noqa: PLC0415

        def got() -> tuple[bytes, int]:
            asked: Any = {"range": {"suffix": size}}
            if not self.bucket.suffixes:
                whole = obstore.head(self.bucket.store, self.key)
                if not whole["size"]:
                    return b"", 0
                asked = {"range": (max(0, whole["size"] - size), whole["size"]), "if_match": whole["e_tag"]}
            answer = obstore.get(self.bucket.store, self.key, options=asked)
            return bytes(answer.bytes()), answer.meta["size"]

        return self._asked("read", got)

    def part(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` up to ``end``; fewer if the object ends before. Raises FileNotFoundError."""
        import obstore  # noqa: PLC0415

        return self._asked("read", lambda: bytes(obstore.get_range(self.bucket.store, self.key, start=start, end=end)))

    def open(self) -> IO[bytes]:
        """The object as a file to read. Raises FileNotFoundError."""
        import obstore  # noqa: PLC0415

        opened: Any = self._asked(
            "read", lambda: obstore.open_reader(self.bucket.store, self.key, buffer_size=_READ_AHEAD)
        )
        return ReadObject(self, opened)  # type: ignore[return-value]

    # -- writing ----------------------------------------------------------------------------------------------------

    def create(self, content: bytes) -> str:
        """Write an object that must not be there yet. Returns its tag. Raises FileExistsError if another one is."""
        return self._put(content, "create", lambda: FileExistsError(f"{self} exists"))

    def swap(self, content: bytes, tag: str) -> str:
        """Write the object if it is the one with ``tag``. Returns its new tag. Raises FileExistsError if not."""
        refused = FileExistsError(f"{self} was changed")
        try:
            return self._put(content, self.bucket.condition(tag), lambda: refused)
        except FileExistsError:
            if self.bucket.bare or not tag.startswith('"') or not self._has(tag):
                raise
        done = self._put(content, {self.bucket.tag: tag.strip('"')}, lambda: refused)
        self.bucket.bare.append(True)
        return done

    def _has(self, tag: str) -> bool:
        try:
            return self.head()[1] == tag
        except FileNotFoundError:
            return False

    def _put(self, content: bytes, mode: Any, refused: Callable[[], FileExistsError]) -> str:
        import obstore  # noqa: PLC0415
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        for attempt in range(_CONFLICTS_MAX):
            trouble: Exception | None = None
            try:
                done = obstore.put(self.bucket.store, self.key, content, mode=mode)
                return self.bucket.tag_of(done) or self.head()[1]
            except (AlreadyExistsError, PreconditionError):
                pass
            except Exception as error:  # noqa: BLE001  whatever it was: the store may have done it
                trouble = error
            try:
                found, tag = self.read()
            except FileNotFoundError:
                found, tag = None, ""
            if found == content:
                return tag
            before = mode[self.bucket.tag] if isinstance(mode, dict) else ""
            if trouble is not None and (found is None or tag.strip('"') == before.strip('"')):
                raise self.trouble("write", trouble) from trouble
            if found is not None or isinstance(mode, dict):
                break
            time.sleep(0.05 * 2**attempt)
        raise refused()

    def upload(self, path: Path) -> None:
        """Write the object from a file, whole or not at all: a large one in parts, which appear at the end together.
        The name must be one that nobody else uses, since an upload is repeated when an answer is lost."""
        import obstore  # noqa: PLC0415

        trouble: Exception | None = None
        try:
            obstore.put(self.bucket.store, self.key, path)
        except Exception as error:  # noqa: BLE001  the end of an upload in parts, asked for again, is "no such upload"
            trouble = error
        try:
            size = self.head()[0]
        except FileNotFoundError:
            size = -1
        if trouble is not None and size != path.stat().st_size:
            raise self.trouble("write", trouble) from None
        if size != path.stat().st_size:
            raise StoreAwayError(f"{self} was not written whole: it has {size} bytes")

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object. It is no error if there is none."""
        import obstore  # noqa: PLC0415

        with suppress(FileNotFoundError):  # what S3 does not say, Azure does
            self._asked("delete", lambda: obstore.delete(self.bucket.store, self.key))

    # -- errors -----------------------------------------------------------------------------------------------------

    def _asked(self, what: str, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except FileNotFoundError:
            raise FileNotFoundError(f"{self} does not exist") from None
        except Exception as error:  # noqa: BLE001  the library has many, and none in common
            raise self.trouble(what, error) from None

    def trouble(self, what: str, error: Exception) -> StoreAwayError:
        """The error for a request that failed."""
        hint = "What was committed before is intact. Start again when the store answers and the rights are there"
        return StoreAwayError(
            f"cannot {what} {self}: {reason(error).rstrip('.')}", hint=_FULL if _NO_ROOM.search(str(error)) else hint
        )


class ReadObject:
    """An object that is read like a file, whose errors say what they mean."""

    def __init__(self, place: ObjectPlace, opened: Any) -> None:
        self._place = place
        self._opened = opened
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        """Up to ``size`` bytes from here on."""
        try:
            return bytes(self._opened.read() if size < 0 else self._opened.read(size))
        except Exception as error:  # noqa: BLE001  as in ObjectPlace
            raise self._place.trouble("read", error) from None

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to another place."""
        return int(self._opened.seek(offset, whence))

    def readline(self, size: int = -1) -> bytes:
        """The next line."""
        try:
            return bytes(self._opened.readline())
        except Exception as error:  # noqa: BLE001  as in ObjectPlace
            raise self._place.trouble("read", error) from None

    def tell(self) -> int:
        """Where the next byte comes from."""
        return int(self._opened.tell())

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def writable(self) -> bool:
        """It is not."""
        return False

    def close(self) -> None:
        """Nothing is held."""
        self.closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reason(error: BaseException) -> str:
    """What a store's or a reader's error says, in a line, without what may hold keys or signatures: of a store's answer
    its code and its message, of an address nothing after the question mark."""
    text = _COLOUR.sub("", str(error)).split("Debug source:")[0]
    answer = _CODE.search(text)
    if answer is not None:
        return " ".join(": ".join(filter(None, answer.groups())).split())
    return " ".join(_QUERY.sub("", text).replace("↳", "").split())[:500]


def is_object_uri(text: str) -> bool:
    """Whether ``text`` names a place in an object store that we know."""
    return scheme_of(text) is not None


def object_place(
    uri: str, *, beside: Path, options: Mapping[str, str] | None = None, retry: timedelta = _RETRY
) -> ObjectPlace:
    """The place of ``s3://bucket/prefix``, ``az://container/prefix``,
    ``abfss://container@account.dfs.core.windows.net/prefix`` or ``gs://bucket/prefix``.

    Args:
        beside: the local directory that belongs to it: the state of tables, or of an archive's writer
        options: as ``obstore`` and ``deltalake`` name them (``aws_endpoint``); by default the environment's ``AWS_*``,
            ``AZURE_*`` or ``GOOGLE_*``

    Raises UsageError, which does not repeat the URI, for one that names no bucket.
    """
    scheme = scheme_of(uri) or S3
    found = match_of(scheme, uri)
    parts = [part for part in found["prefix"].split("/") if part]
    if any(part in (".", "..") or not re.fullmatch(r"[A-Za-z0-9!_.'()=-]+", part) for part in parts):
        raise UsageError("the prefix in an object store may have letters, digits and !_.'()=- between slashes")
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415
    except ImportError:
        raise UsageError("object stores need the package obstore", hint=EXTRA) from None
    given = scheme.options(found, options or {})
    try:
        store = scheme.open(found["bucket"], given, retry)
    except (BaseError, ValueError) as error:
        raise UsageError(f"the object store cannot be opened: {reason(error)}", hint=scheme.keys) from None
    options = {**given, "retry_timeout": f"{int(retry.total_seconds())}s", "max_retries": str(_REPEATED_MAX)}
    name = scheme.root.format(**found)
    bucket = ObjectBucket(name, store, options, beside, suffixes=scheme.suffixes, tag=scheme.tag)
    return ObjectPlace(bucket, "/".join(parts))
