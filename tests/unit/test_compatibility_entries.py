"""The oplog entries that set the feature compatibility version, as 6.0.27 writes them. Nobody had looked at them."""

from __future__ import annotations

from typing import Any

import bson

from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.oplog.compatibility import last_setting, settings_in
from tailrace.read.archive.compatibility import set_since
from tailrace.read.archive.layout import VersionNote
from tailrace.read.source.member_version import MemberVersion

SETTING = "featureCompatibilityVersion"


def entry(seconds: int, operation: str = "u", ns: str = "admin.system.version", **document: Any) -> bytes:
    time = bson.Timestamp(seconds, 1)
    more = {"o2": {"_id": SETTING}} if operation == "u" else {}
    o = {"_id": SETTING, **document}
    return bson.encode({"op": operation, "ns": ns, "o": o, **more, "ts": time, "t": bson.Int64(1), "v": bson.Int64(2)})


DOWN = [
    entry(10, version="5.0", targetVersion="5.0", previousVersion="6.0"),
    entry(11, version="5.0"),
]
UP = [entry(20, version="5.0", targetVersion="6.0"), entry(21, version="6.0")]


def test_the_last_change_is_that_of_the_version_that_the_server_goes_by() -> None:
    assert last_setting([]) is None
    assert last_setting(DOWN) == ("5.0", ClusterTime.of(10, 1)), "from the first entry on it goes by the lower one"
    assert last_setting(DOWN + UP) == ("6.0", ClusterTime.of(21, 1)), "until the last one it goes by the lower one"
    before = last_setting(DOWN)
    assert last_setting(UP[:1], before) == before
    assert last_setting([entry(1, "i", version="6.0")]) == ("6.0", ClusterTime.of(1, 1))


def test_other_entries_that_hold_the_word_set_nothing() -> None:
    others = [
        entry(1, ns="shop.orders", version="5.0"),
        entry(2, "d", version="5.0"),
        bson.encode({**bson.decode(entry(3)), "o": {"_id": "authSchema", SETTING: "5.0", "version": "5.0"}}),
        bson.encode({**bson.decode(entry(4)), "o": {"_id": SETTING, "version": 5}}),
    ]
    assert last_setting(others) is None


def noted(before: str, *shards: list[bytes], since: int = 0) -> list[tuple[str, int]]:
    read = {f"s{number}": list(settings_in(entries)) for number, entries in enumerate(shards)}
    return [
        (note.version, note.since.seconds) for note in set_since(VersionNote(before, ClusterTime.of(since, 0)), read)
    ]


def test_an_archive_notes_each_change_at_the_entry_that_makes_it() -> None:
    own, below = "6.0.27", "6.0.27-fcv5.0"
    assert noted(own, []) == []
    assert noted(own, DOWN) == [(below, 10)]
    assert noted(below, DOWN) == []
    assert noted(own, DOWN + UP) == [(below, 10), (own, 21)]
    assert noted(below, DOWN + UP, since=10) == [(own, 21)], "what was noted before is not noted again"
    assert noted(own, DOWN + UP, since=21) == []


def test_of_a_cluster_the_lowest_setting_counts() -> None:
    own, below = "6.0.27", "6.0.27-fcv5.0"
    assert noted(own, DOWN, []) == [(below, 10)]
    assert noted(below, UP, []) == [], "the other shard is still below"
    later = [entry(30, version="5.0", targetVersion="6.0"), entry(31, version="6.0")]
    assert noted(below, UP, later) == [(own, 31)]
    assert noted(own, DOWN + UP, DOWN + later) == [(below, 10), (own, 31)]


def test_a_member_is_known_by_its_series_until_it_says_what_it_is_set_to() -> None:
    series = MemberVersion.of_series("6.0")
    assert not series.is_certain
    assert not series.needs_all_numbers
    low, own = series.at("5.0"), series.at("6.0")
    assert (low.text, own.text) == ("6.0-fcv5.0", "6.0")
    assert low.profiles == MemberVersion.whole("6.0.27-fcv5.0").profiles
    assert own.profiles == MemberVersion.whole("6.0.27").profiles == series.at(None).profiles
    assert low.profiles.isdisjoint(own.profiles)
    assert low.profiles | own.profiles == series.profiles
    assert not low.is_whole
    assert MemberVersion.whole("6.0.27-fcv5.0").is_whole
    assert MemberVersion.of_series("7.0").needs_all_numbers
    assert MemberVersion.whole("7.0.28").at("6.0") == MemberVersion.whole("7.0.28-fcv6.0")
