"""The catalogue that shows tables as Iceberg tables: asked again for a while if it does not answer, and without its
secrets in any message about it. Needs the extra ``iceberg``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tailrace.core.printable import in_a_line
from tailrace.errors import SinkError, UsageError
from tailrace.lake.iceberg.opened import rest_catalog, sql_catalog
from tailrace.lake.iceberg.settings import TYPES, IcebergSettings, texts_of
from tailrace.lake.store.place import TablePlace

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog

T = TypeVar("T")
#: How long a catalogue that does not answer is asked again before the writer ends.
RETRY_S: Final = 60.0
#: PostgreSQL's disk_full.
_DISK_FULL: Final = "53100"
_PAUSES_S: Final = (0.1, 0.5, 1.0, 2.0, 5.0)


class CatalogError(SinkError):
    """The catalogue does not answer, or refuses."""


class IcebergCatalog:
    """The catalogue of ``settings``, opened when it is first asked.

    ``root``  where its tables' files are; ``None``: on a disk
    ``wait``  waits some seconds, and says whether to give up (an event's ``wait``)
    """

    def __init__(
        self,
        settings: IcebergSettings,
        *,
        root: TablePlace | None = None,
        wait: Callable[[float], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._root = root
        self._wait = wait or _slept
        self._clock = clock
        self._opened: Catalog | None = None
        self._secrets = texts_of(settings.properties)
        try:
            import pyiceberg.catalog  # noqa: F401, PLC0415  an extra
        except ImportError as error:
            raise UsageError(
                "Iceberg snapshots need the package pyiceberg", hint="pip install 'tailrace[iceberg]'"
            ) from error
        except Exception as error:  # noqa: BLE001  it reads its file when it is imported; its parser's error shows lines
            raise UsageError(
                f"pyiceberg cannot read its settings (.pyiceberg.yaml or PYICEBERG_...): {type(error).__name__}",
                hint="Correct the file; it is looked for in PYICEBERG_HOME, the home directory and the current one",
            ) from None

    @property
    def name(self) -> str:
        """The catalogue's name."""
        return self._settings.name

    def ask(self, work: Callable[[Catalog], T], *, patient: bool = True) -> T:
        """What ``work`` returns. It is done again if the catalogue does not answer, or if somebody else has committed
        meanwhile, so doing it twice must be the same as doing it once. Not ``patient``: it is
        done once. Raises CatalogError."""
        end, number = self._clock() + (RETRY_S if patient else 0), 0
        while True:
            try:
                if self._opened is None:
                    self._opened = self._open()
                return work(self._opened)
            except (SinkError, UsageError):
                self.close()  # its file may have been replaced: an open connection would stay with the old one
                raise
            except Exception as error:  # noqa: BLE001  pyiceberg, requests and SQLAlchemy have no common class
                if type(error).__module__.startswith("sqlalchemy."):
                    self.close()
                if not may_pass(error) or self._clock() >= end or self._wait(_PAUSES_S[min(number, 4)]):
                    raise self._told(error) from None
            number += 1

    def close(self) -> None:
        """Close its connections."""
        if self._opened is not None:
            with suppress(Exception):
                self._opened.close()
            self._opened = None

    def _open(self) -> Catalog:
        from pyiceberg.catalog import infer_catalog_type  # noqa: PLC0415
        from pyiceberg.utils.config import Config  # noqa: PLC0415

        found: Mapping[str, Any] = {
            **(Config().get_catalog_config(self.name) or {}),
            **self._settings.properties,
        }
        self._secrets = texts_of(found)
        if not found:
            raise UsageError(
                f"there is no Iceberg catalogue '{in_a_line(self.name)}'",
                hint="Describe it in .pyiceberg.yaml, or give the catalogue's URI",
            )
        if "type" not in found and "uri" not in found:
            raise UsageError(f"the Iceberg catalogue '{in_a_line(self.name)}' has no uri")
        kind = str(found.get("type") or getattr(infer_catalog_type(self.name, dict(found)), "value", "")).lower()
        if kind not in TYPES or "py-catalog-impl" in found:
            raise UsageError(f"the Iceberg catalogue '{in_a_line(self.name)}' is of a kind that is not supported")
        return (sql_catalog if kind == "sql" else rest_catalog)(self.name, found, self._root)

    def _told(self, error: Exception) -> CatalogError:
        """The error in words, without what the properties hold."""
        text = in_a_line(str(getattr(error, "orig", None) or error))  # SQLAlchemy adds the statement
        for secret in self._secrets:
            text = text.replace(secret, "***")
        state = "has no room left" if _is_full(error) else "does not answer" if may_pass(error) else "refuses"
        return CatalogError(
            f"the Iceberg catalogue '{in_a_line(self.name)}' {state}: {type(error).__name__}: {text[:500]}",
            hint="Nothing is lost: the next run brings the catalogue up to the tables",
        )


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _is_full(error: Exception) -> bool:
    """Whether the catalogue's disk is full, as SQLite, PostgreSQL's drivers and HTTP say it: somebody has to make
    room."""
    original = getattr(error, "orig", None)  # SQLAlchemy's error holds the driver's
    if getattr(original, "sqlite_errorname", "") == "SQLITE_FULL":
        return True
    if _DISK_FULL in (getattr(original, name, None) for name in ("pgcode", "sqlstate")):
        return True
    response = getattr(error.__cause__, "response", None)  # pyiceberg's error has no status
    return bool(getattr(response, "status_code", 0) == HTTPStatus.INSUFFICIENT_STORAGE)


def may_pass(error: Exception) -> bool:
    """Whether the same may succeed later, without anybody's doing."""
    if _is_full(error):
        return False
    from pyiceberg import exceptions  # noqa: PLC0415
    from requests import exceptions as http  # noqa: PLC0415

    passing: list[type[Exception]] = [
        exceptions.CommitFailedException,
        exceptions.CommitStateUnknownException,
        exceptions.NoSuchNamespaceError,  # somebody has removed it, or the table, since we looked
        exceptions.NoSuchTableError,
        exceptions.ServerError,
        exceptions.ServiceUnavailableError,
        exceptions.TableAlreadyExistsError,
        exceptions.TooManyRequestsError,
        http.ConnectionError,
        http.Timeout,
        http.ChunkedEncodingError,
    ]
    with suppress(ImportError):
        from sqlalchemy.exc import InterfaceError, OperationalError  # noqa: PLC0415

        passing += [InterfaceError, OperationalError]
    return isinstance(error, tuple(passing))
