"""The arguments of ``MongoClient(...)``: taken as PyMongo takes them, and kept so that no secret in them shows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final

from bson.errors import BSONError
from pymongo.errors import InvalidURI, PyMongoError
from pymongo.server_api import ServerApi

from tailrace.errors import UsageError
from tailrace.read.source.connection import unusable
from tailrace.read.source.driver_error import as_driver_error
from tailrace.read.source.uri import (
    REDACTED,
    ClientOptions,
    ConnectionString,
    hide,
    parse_complaint,
    redact_uri,
    without_scheme,
)

_SCHEME: Final = re.compile(r"mongodb(\+srv)?://", re.IGNORECASE)
#: Options that mean nothing to a reader of the oplog, or would change what it reads. The listeners are the user's: they
#: are notified only of the user's commands.
_NOT_OF_READERS: Final = frozenset(
    {"document_class", "tz_aware", "tzinfo", "type_registry", "datetime_conversion", "unicode_decode_error_handler"}
    | {"event_listeners", "auto_encryption_opts", "connect", "readconcernlevel"}
)


class _SecretText(str):
    """A text that does not show the secrets in it where a container of it is printed."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(redact_uri(self, whole=True)) if _SCHEME.match(self) else repr(REDACTED)


class Unshown(dict[str, Any]):
    """A dictionary of PyMongo's that may hold a password: it is not printed."""

    def __repr__(self) -> str:
        return "{...}"


class Arguments:
    """``host``, ``port`` and options of a client. ``shards`` are the URIs where the list names the shards of a cluster,
    each by its own, which PyMongo does not take."""

    def __init__(self, host: Any, port: Any, options: dict[str, Any]) -> None:
        self.options = ClientOptions(options)
        self.port = port
        host = self.hidden(host)
        texts = [host] if isinstance(host, str) else host
        if isinstance(texts, Iterable) and not isinstance(texts, (bytes, bytearray)):
            texts = [_hidden(text) for text in texts]
            uris = [text for text in texts if isinstance(text, _SecretText) and "/" in text]
        else:
            uris = []
        self.shards = [hide(str(uri)) for uri in uris] if len(uris) > 1 and len(uris) == len(texts) else []
        self.hosts: Any = [uris[0]] if self.shards else texts
        for uri in uris:
            if re.search(r"\s", uri.partition("://")[2].rpartition("@")[2].partition("/")[0]):
                raise as_driver_error(unusable(None), ValueError)  # PyMongo would take half of a password for a host

    @staticmethod
    def hidden(host: Any) -> Any:
        """``host`` with the URIs in it in a form that does not show their secrets."""
        if isinstance(host, (str, ConnectionString)):
            return _hidden(host)
        return [_hidden(each) for each in host] if isinstance(host, (list, tuple)) else host

    def __repr__(self) -> str:
        return f"Arguments(port={self.port!r}, options={self.options!r})"

    def construct(self, make: Callable[..., None], **named: Any) -> None:
        """Call PyMongo's constructor with them and the ``named`` ones. Raises its error as ours too, and warns as it
        does; neither holds a secret."""
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                make(host=self.hosts, port=self.port, **named, **self.options)
        except (PyMongoError, BSONError, ValueError, TypeError, KeyError, OSError, AttributeError) as error:
            said = self._complaint(error)
            if isinstance(error, TypeError) and said is not None:
                raise refused(f"the client cannot be made: {said}", TypeError) from None
            raise as_driver_error(unusable(said), type(error)) from None
        for warning in warned:
            said = self._complaint(warning.message) or "an option of the client was not understood"
            warnings.warn(said, warning.category, stacklevel=4)

    def _complaint(self, said: BaseException | str) -> str | None:
        texts = self.hosts if isinstance(self.hosts, list) else []
        uri = next((str(text) for text in texts if isinstance(text, str) and "/" in text), "")
        return parse_complaint(str(said), uri, self.options)

    def uri(self, seeds: Iterable[tuple[str, int | None]]) -> ConnectionString:
        """One URI that names the deployment; ``seeds`` are the addresses that PyMongo has found in the arguments."""
        members = ",".join(_address(host, port) for host, port in seeds)
        texts = [str(text) for text in self.hosts or ()]
        uri = next((text for text in texts if "/" in text), None)
        if uri is None:
            return hide(f"mongodb://{members}/")
        if len(texts) == 1 or uri.startswith("mongodb+srv"):
            return hide(uri)
        scheme, _, rest = uri.partition("://")
        authority, slash, tail = rest.partition("/")
        user, at, _ = authority.rpartition("@")
        return hide(f"{scheme}://{user}{at}{members}{slash}{tail}")

    @property
    def of_readers(self) -> ClientOptions:
        """The options of the connections that the oplog is read by."""
        options = {name: value for name, value in self.options.items() if name.lower() not in _NOT_OF_READERS}
        api = next((value for name, value in options.items() if name.lower() == "server_api"), None)
        if isinstance(api, ServerApi) and api.strict:
            # Tailable cursors are no part of the stable API.
            options = {name: value for name, value in options.items() if name.lower() != "server_api"}
            options["server_api"] = ServerApi(api.version, strict=False)
        return ClientOptions(options)


def _hidden(text: Any) -> Any:
    if isinstance(text, ConnectionString):  # of a command: a URI, and nothing else that PyMongo takes
        if _SCHEME.match(text.reveal()) is None:
            message, hint = without_scheme(text.reveal())
            raise refused(message, InvalidURI, hint)
        text = text.reveal()
    return _SecretText(text) if isinstance(text, str) and "/" in text else text


def _address(host: str, port: int | None) -> str:
    if port is None:  # a socket of this machine
        return host.replace("/", "%2F")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def refused(message: str, kind: type[Exception], hint: str | None = None) -> UsageError:
    """The caller fixes the call, as PyMongo would say it: by an exception of ``kind``."""
    error = as_driver_error(UsageError(message, hint=hint), kind)
    assert isinstance(error, UsageError)
    return error
