"""pyiceberg's catalogues and files as they are opened here: with an end to waiting, and with our own client for a
store. None of them reads metadata in a place that its tables are not in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tailrace.base.object_place import ObjectPlace
from tailrace.lake.iceberg.where import ElsewhereError
from tailrace.lake.store.place import TablePlace

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.io import FileIO

#: One request of a REST catalogue: to connect, and to wait for a part of the answer.
_TIMEOUT_S: Final = (10.0, 30.0)


def io_of(root: TablePlace) -> FileIO:
    """What pyiceberg reads and writes files below ``root`` with. In a store that is our own client, with the keys, the
    repetitions and the errors that the Delta tables there have; pyiceberg's settings of a store are for readers."""
    if isinstance(root, ObjectPlace):
        from tailrace.lake.iceberg.object_files import ObjectFiles  # noqa: PLC0415  an extra

        return ObjectFiles(root)
    from pyiceberg.io.pyarrow import PyArrowFileIO  # noqa: PLC0415

    return PyArrowFileIO()


def sql_catalog(name: str, properties: Mapping[str, Any], root: TablePlace | None) -> Catalog:
    """A catalogue in a database, which this process writes metadata for."""
    from pyiceberg.catalog.sql import SqlCatalog  # noqa: PLC0415
    from pyiceberg.serializers import FromInputFile  # noqa: PLC0415
    from pyiceberg.table import Table  # noqa: PLC0415

    class Placed(SqlCatalog):
        def _convert_orm_to_iceberg(self, orm_table: Any) -> Table:
            location = orm_table.metadata_location or ""
            if not isinstance(root, ObjectPlace):
                if "://" in location and not location.startswith("file://"):
                    raise ElsewhereError(f"{location} is not on a disk")
                return super()._convert_orm_to_iceberg(orm_table)
            files = io_of(root)
            metadata = FromInputFile.table_metadata(files.new_input(location))
            identifier = (*self.identifier_to_tuple(orm_table.table_namespace), orm_table.table_name)
            return Table(identifier, metadata, location, files, self)

        def _load_file_io(self, properties: Mapping[str, Any] = {}, location: str | None = None) -> FileIO:
            return io_of(root) if isinstance(root, ObjectPlace) else super()._load_file_io(dict(properties), location)

    return Placed(name, **properties)


def rest_catalog(name: str, properties: Mapping[str, Any], root: TablePlace | None) -> Catalog:
    """A catalogue behind a server, which writes the metadata itself."""
    from pyiceberg.catalog.rest import RestCatalog  # noqa: PLC0415

    class Patient(RestCatalog):
        """pyiceberg sets no time limit for a request."""

        def _create_session(self) -> Any:
            session = super()._create_session()
            for scheme in ("http://", "https://"):
                session.mount(scheme, _timed_adapter())
            return session

        def _load_file_io(self, properties: Mapping[str, Any] = {}, location: str | None = None) -> FileIO:
            return io_of(root) if isinstance(root, ObjectPlace) else super()._load_file_io(dict(properties), location)

    return Patient(name, **{key: value for key, value in properties.items() if key != "type"})


def _timed_adapter() -> Any:
    from requests.adapters import HTTPAdapter  # noqa: PLC0415

    class Timed(HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> Any:
            return super().send(request, *args, **{**options, "timeout": options.get("timeout") or _TIMEOUT_S})

    return Timed()
