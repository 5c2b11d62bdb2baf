"""The oplog entry that sets a deployment's feature compatibility version (measured on 5.0.4, 6.0.27 and 7.0.28)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tailrace.core import raw_bson
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.entry import parse_entry

#: The document's ``_id`` in ``admin.system.version``, which its entries hold.
SETTING: Final = b"featureCompatibilityVersion"
_NAMESPACE: Final = b"admin.system.version"


class SettingRead(NamedTuple):
    """The entry at ``time`` has set it to ``version``, such as "6.0"."""

    version: str
    time: ClusterTime


def setting_of(document: bytes) -> str | None:
    """The version that a document of ``admin.system.version`` sets. While the server changes it, the document names
    the lower one, by which the server goes."""
    if _text(document, b"_id") != SETTING:
        return None
    found = _text(document, b"version")
    return None if found is None else found.decode("utf-8", "replace")


def _text(document: bytes, name: bytes) -> bytes | None:
    element = raw_bson.find(document, name)
    is_text = element is not None and element.type == raw_bson.STRING
    return raw_bson.read_string(document, element.value_start) if element is not None and is_text else None


def settings_in(entries: Iterable[bytes]) -> Iterator[SettingRead]:
    """What these entries set it to, one after another. Every server writes the whole document."""
    for raw in entries:
        if SETTING not in raw:
            continue
        entry = parse_entry(raw)
        if entry.operation not in ("i", "u") or entry.namespace != _NAMESPACE:
            continue
        version = None if entry.o is None else setting_of(entry.o)
        if version is not None:
            yield SettingRead(version, entry.cluster_time)


def last_setting(entries: Iterable[bytes], before: SettingRead | None = None) -> SettingRead | None:
    """What is set after these entries; ``before`` where none of them sets another."""
    found = before
    for one in settings_in(entries):
        if found is None or found.version != one.version:
            found = one
    return found
