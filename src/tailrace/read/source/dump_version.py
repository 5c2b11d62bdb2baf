"""Which server's events a dump is replayed as: what the dump says about its server, and what its entries prove.

A current ``mongodump`` writes ``prelude.json`` with the server's version into the dump's directory, and an archive says
it in its header. Entries prove a version too (``tailrace.core.oplog.version_proof``). The feature compatibility
version is in the dump's ``admin.system.version``, or in the last entry that has set it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from pathlib import Path
from typing import Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.core.oplog.compatibility import SETTING, SettingRead, last_setting, setting_of
from tailrace.core.oplog.entry import first_elements, parse_entry
from tailrace.core.oplog.version_proof import MULTI_OP_SINCE, VersionProof, version_proof
from tailrace.core.plan.profile import profile_for, with_compatibility
from tailrace.errors import OplogFormatError, SourceError, UsageError
from tailrace.read.source.bson_file import documents

#: Of a dump that neither says nor proves anything.
ASSUMED: Final = "6.0"
_PRELUDE: Final = "prelude.json"
_PRELUDE_BYTES_MAX: Final = 1 << 20


class DumpVersion(NamedTuple):
    """A server version and, for people, why it is that one."""

    version: str
    why: str


class SaidVersion(NamedTuple):
    """A server version, and who says so: the name of a file, or a part of one."""

    version: str
    where: str


def version_of(oplog: Path, folder: Path | None = None, said: SaidVersion | None = None) -> DumpVersion:
    """The server version whose events the entries of ``oplog`` gave. ``folder`` is the dump's directory, if known;
    ``said``: what an archive says about itself.

    Reads the file once, unless the dump says the newest version that an entry can prove, or a later one. Raises
    UsageError where the dump says one version and an entry proves a later one, and SourceError for a prelude that
    cannot be read.
    """
    said = _said_version(oplog, folder) if said is None else _checked(said)
    if said is not None and profile_for(said[0]).version >= profile_for(MULTI_OP_SINCE).version:
        return DumpVersion(said[0], f"{said[1]} says so")
    proof, setting = _read(oplog)
    setting = setting or _dumped_setting(oplog, folder)
    if said is not None and proof is not None and profile_for(proof.version).version > profile_for(said[0]).version:
        raise UsageError(
            f"{said[1]} says that the dump is of MongoDB {said[0]}, but {proof.found}, as only {proof.version} and "
            "later write it",
            hint="Name the version that the entries are of: --server-version",
        )
    if said is not None:
        return DumpVersion(with_compatibility(said[0], setting), f"{said[1]} says so")
    if proof is not None:
        version = with_compatibility(proof.version, setting)
        return DumpVersion(version, f"{proof.found}, as only {proof.version} and later write it")
    return DumpVersion(ASSUMED, "the dump does not say its server's version, and no entry shows a later one")


def _checked(said: SaidVersion) -> SaidVersion:
    try:
        profile_for(said.version)
    except UsageError as error:
        raise SourceError(
            f"{said.where} does not say a server version that is known", hint="Name it: --server-version"
        ) from error
    return said


def _said_version(oplog: Path, folder: Path | None) -> SaidVersion | None:
    """What the prelude says, and where it lies: with the oplog, or one directory above it."""
    places = [oplog.parent] if folder is None else [folder, oplog.parent]
    if oplog.parent.name == "local":
        places.append(oplog.parent.parent)
    for place in places:
        for name in (_PRELUDE, f"{_PRELUDE}.gz"):
            if (place / name).is_file():
                return SaidVersion(_read_prelude(place / name), str(place / name))
    return None


def _read_prelude(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            prelude = json.loads(file.read(_PRELUDE_BYTES_MAX))
        version = prelude["ServerVersion"]
        profile_for(version)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (EOFError, ValueError, TypeError, KeyError, AttributeError, UsageError) as error:
        raise SourceError(
            f"{path} does not say a server version that is known", hint="Name it: --server-version"
        ) from error
    return str(version)


def _read(oplog: Path) -> tuple[VersionProof | None, str | None]:
    """The entry that proves the latest version, and the feature compatibility version at the end, if an entry sets it.
    Damage is not reported here: a reader of the entries meets it."""
    found: VersionProof | None = None
    setting: SettingRead | None = None
    with contextlib.suppress(OplogFormatError, SourceError):
        for document in documents(oplog):
            if SETTING in document.raw:
                setting = last_setting([document.raw], setting)
            if b"applyOps" not in document.raw:
                continue
            entry = parse_entry(document.raw)
            proof = None if entry.operation != "c" else version_proof(entry, first_elements(entry.o))
            if proof is not None and proof.version == MULTI_OP_SINCE:
                return proof, None
            found = found or proof
    return found, None if setting is None else setting.version


def _dumped_setting(oplog: Path, folder: Path | None) -> str | None:
    """The feature compatibility version in the dump's own copy of ``admin.system.version``."""
    places = [oplog.parent, oplog.parent.parent] if folder is None else [folder, oplog.parent]
    for place in places:
        path = place / "admin" / "system.version.bson"
        zipped = path.with_name(f"{path.name}.gz")
        with contextlib.suppress(OSError, EOFError, OplogFormatError):
            if path.is_file() or zipped.is_file():
                raw = path.read_bytes() if path.is_file() else gzip.decompress(zipped.read_bytes())
                found = [setting for one in raw_bson.split(raw) if (setting := setting_of(one)) is not None]
                return found[-1] if found else None
    return None
