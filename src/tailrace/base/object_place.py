"""A place in an object store, with as much of a path's behaviour as tables and archives need, and the two steps that
they rest on.

``create`` writes an object that must not be there yet (``If-None-Match: *``), ``swap`` one that must be what was read
(``If-Match``). An answer may be lost after the store has done what was asked, and the library asks again: then the
object exists, and what it holds says whose it is. So a writer that is refused reads it back and compares. Two writers
must never write the same content in this way; ours names its writer.

What the store answers is repeated without the parts that may hold keys or signatures (``reason``).
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

from tailrace.errors import SinkError, UsageError

if TYPE_CHECKING:
    from obstore.store import S3Store

SCHEME: Final = "s3"
EXTRA: Final = "pip install 'tailrace[s3]'"
_URI: Final = re.compile(r"s3a?://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?", re.DOTALL)
#: A request is repeated for this long before the store counts as out of reach.
_RETRY: Final = timedelta(minutes=3)
_READ_AHEAD: Final = 1 << 20
#: A store may answer "conflict" where another request of ours was not finished.
_CONFLICTS_MAX: Final = 5
_CODE: Final = re.compile(r"<Code>([^<]*)</Code>(?:\s*<Message>([^<]*)</Message>)?")
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
_QUERY: Final = re.compile(r"\?\S+")

T = TypeVar("T")


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
    """A bucket that was opened.

    ``options``  for ``obstore`` and ``deltalake`` alike; they may hold keys, so nothing prints them
    ``beside``   the local directory that belongs to what is kept there: state, lock, files on their way. Readers of an
                 archive need none
    """

    name: str
    store: S3Store = field(repr=False)
    options: Mapping[str, str] = field(repr=False)
    beside: Path
    #: How far the store's clock is ahead of ours, in seconds, once that was measured.
    clock: list[float] = field(default_factory=list)


class ObjectPlace:
    """An object, or all objects whose keys begin with ``key`` and a slash, in ``bucket``."""

    def __init__(self, bucket: ObjectBucket, key: str) -> None:
        self.bucket = bucket
        self.key = key

    def __str__(self) -> str:
        return f"{SCHEME}://{self.bucket.name}/{self.key}".rstrip("/")

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
        """``s3://bucket/key``."""
        return str(self)

    # -- reading ----------------------------------------------------------------------------------------------------

    def read_bytes(self) -> bytes:
        """What the object holds. Raises FileNotFoundError."""
        return self.read()[0]

    def read(self) -> tuple[bytes, str]:
        """What the object holds, and its ETag. Raises FileNotFoundError."""
        import obstore  # noqa: PLC0415  an extra

        def got() -> tuple[bytes, str]:
            answer = obstore.get(self.bucket.store, self.key)
            return bytes(answer.bytes()), answer.meta["e_tag"] or ""

        return self._asked("read", got)

    def head(self) -> tuple[int, str]:
        """The object's size in bytes, and its ETag. Raises FileNotFoundError."""
        import obstore  # noqa: PLC0415

        found = self._asked("read", lambda: obstore.head(self.bucket.store, self.key))
        return found["size"], found["e_tag"] or ""

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
            answer = obstore.get(self.bucket.store, self.key, options={"range": {"suffix": size}})
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
        """Write an object that must not be there yet. Returns its ETag. Raises FileExistsError if another one is."""
        return self._put(content, "create", lambda: FileExistsError(f"{self} exists"))

    def swap(self, content: bytes, etag: str) -> str:
        """Write the object if it is the one with ``etag``. Returns its new ETag. Raises FileExistsError if not."""
        return self._put(content, {"e_tag": etag}, lambda: FileExistsError(f"{self} was changed"))

    def _put(self, content: bytes, mode: Any, refused: Callable[[], FileExistsError]) -> str:
        import obstore  # noqa: PLC0415
        from obstore.exceptions import AlreadyExistsError, PreconditionError  # noqa: PLC0415

        for attempt in range(_CONFLICTS_MAX):
            trouble: Exception | None = None
            try:
                done = obstore.put(self.bucket.store, self.key, content, mode=mode)
                return done["e_tag"] or self.head()[1]
            except (AlreadyExistsError, PreconditionError):
                pass
            except Exception as error:  # noqa: BLE001  whatever it was: the store may have done it
                trouble = error
            try:
                found, etag = self.read()
            except FileNotFoundError:
                found, etag = None, ""
            if found == content:
                return etag
            if trouble is not None and (found is None or etag == (mode["e_tag"] if isinstance(mode, dict) else "")):
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
        return StoreAwayError(
            f"cannot {what} {self}: {reason(error)}",
            hint="What was committed before is intact. Start again when the store answers and the rights are there",
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
        return ": ".join(filter(None, answer.groups()))
    return " ".join(_QUERY.sub("", text).replace("↳", "").split())[:500]


def is_object_uri(text: str) -> bool:
    """Whether ``text`` names a place in an object store that we know."""
    return re.match(r"s3a?:/", text) is not None


def object_place(
    uri: str, *, beside: Path, options: Mapping[str, str] | None = None, retry: timedelta = _RETRY
) -> ObjectPlace:
    """The place of ``s3://bucket/prefix``.

    Args:
        beside: the local directory that belongs to it: the state of tables, or of an archive's writer
        options: as ``obstore`` and ``deltalake`` name them (``aws_endpoint``); by default the environment's ``AWS_*``

    Raises UsageError, which does not repeat the URI, for one that names no bucket.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise UsageError(
            "the URI of an object store must be s3://BUCKET/PREFIX, without keys, port or options",
            hint="Keys and endpoint come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and the like",
        )
    parts = [part for part in (match[2] or "").split("/") if part]
    if any(part in (".", "..") or not re.fullmatch(r"[A-Za-z0-9!_.'()=-]+", part) for part in parts):
        raise UsageError("the prefix in an object store may have letters, digits and !_.'()=- between slashes")
    try:
        from obstore.exceptions import BaseError  # noqa: PLC0415
        from obstore.store import S3Store  # noqa: PLC0415
    except ImportError:
        raise UsageError("object stores need the package obstore", hint=EXTRA) from None
    given = {**_environment(), **(options or {}), "aws_conditional_put": "etag"}
    try:
        store = S3Store(match[1], config=given, retry_config={"retry_timeout": retry})  # type: ignore[arg-type]
    except (BaseError, ValueError) as error:
        raise UsageError(f"the object store cannot be opened: {reason(error)}") from None
    options = {**given, "retry_timeout": f"{int(retry.total_seconds())}s"}
    return ObjectPlace(ObjectBucket(match[1], store, options, beside), "/".join(parts))


def _environment() -> dict[str, str]:
    """What both libraries read from the environment by different names."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {} if not endpoint else {"aws_endpoint": endpoint}


def check_store(root: ObjectPlace) -> None:
    """Try what writers need in the store: that a second writer is refused, and that what was written is listed. Its
    clock is compared with ours. Raises a SinkError that says what is missing."""
    place = root / "_tailrace" / f"probe-{uuid.uuid4().hex}"
    first, other = (f"{number} {place.key}".encode() for number in (1, 2))
    try:
        etag = place.create(first)
        if not _refuses(lambda: place.create(other)) or place.read_bytes() != first:
            raise _lacks(root, "overwrites an object that may be written only once (If-None-Match)")
        if not _refuses(lambda: place.swap(other, '"00000000000000000000000000000000"')) or place.read_bytes() != first:
            raise _lacks(root, "does not compare before it replaces an object (If-Match)")
        if place.swap(other, etag) == etag or place.read_bytes() != other:
            raise _lacks(root, "does not give a changed object a new ETag")
        listed = [one for one in (root / "_tailrace").objects() if one.name == place.name]
        if not listed:
            raise _lacks(root, "does not list an object that it has just taken")
        root.bucket.clock[:] = [listed[0].modified - time.time()]
    finally:
        place.unlink()


def _refuses(write: Callable[[], object]) -> bool:
    try:
        write()
    except FileExistsError:
        return True
    return False


def _lacks(root: ObjectPlace, what: str) -> SinkError:
    return SinkError(
        f"the object store of {root} cannot be written safely: it {what}, so two writers would not see each other",
        hint="Use a store with conditional writes (Amazon S3, or a recent version of the one you have), or a directory",
    )
