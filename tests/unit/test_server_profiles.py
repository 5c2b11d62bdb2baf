"""The table of server versions: which profile is used, and the page that is made from it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tailrace import connect
from tailrace.cli import main as main_module
from tailrace.cli.examination import version_finding
from tailrace.core.oplog.namespace import Scope
from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import build_plan
from tailrace.core.plan.profile import (
    PROFILES,
    ServerProfile,
    _parts,
    chosen_profile,
    differences,
    for_people,
    knowledge_of,
    profile_for,
    with_compatibility,
)
from tailrace.core.plan.reference import reference
from tailrace.errors import UsageError

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "server-versions.md"


def test_the_page_on_server_versions_is_the_one_that_the_table_makes() -> None:
    assert PAGE.read_text() == reference()


def test_every_rule_is_one_that_the_code_follows() -> None:
    """Otherwise a new field with its row on the page and in each profile passes all tests before any stage uses it."""
    source = Path(main_module.__file__).parents[1]
    own = {source / "core" / "plan" / name for name in ("profile.py", "reference.py")}
    code = "\n".join(path.read_text() for path in source.rglob("*.py") if path not in own)
    asked = set(re.findall(r"\.(\w+)", code))
    assert {one.name for one in dataclasses.fields(ServerProfile)} - asked == {"measured"}


def test_every_difference_is_explained_and_makes_a_difference() -> None:
    assert len(differences()) == len(PROFILES[0].__slots__) - 2  # all but the two versions
    for says, by_version, evidence in differences():
        assert list(by_version) == [profile.name for profile in PROFILES]
        assert len(set(by_version.values())) > 1, says
        measured, derived = [[by_version[one.name] for one in PROFILES if one.measured is so] for so in (True, False)]
        if evidence is None:
            assert (set(measured), set(derived)) == ({"yes"}, {"no"}), "this is the row about measuring"
            continue
        assert evidence.sources
        assert evidence.confidence in ("high", "medium")
        if set(derived) - {measured[-1]}:
            assert evidence.sources != ("no change known",), says


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("4.4.2", "4.4"),
        ("5.0", "5.0"),
        ("6.0.27", "6.0"),
        ("6.3.1", "6.0"),
        ([7, 0, 1], "7.0"),
        ("7.0.30", "7.0.28"),
        ("7.3.4", "7.0.31"),
        ("8.0.4", "8.0"),
        ("8.0.12", "8.0.5"),
        ("8.0.21", "8.0.16"),
        ("8.1.2", "8.1"),
        ("8.2", "8.2"),
        ("8.2.1", "8.2"),
        ("8.3.0-rc2", "8.3"),
        ("9.0.1", "8.3"),
    ],
)
def test_a_version_has_the_newest_profile_that_is_not_newer(version: str, name: str) -> None:
    assert profile_for(version).name == name


@pytest.mark.parametrize(
    ("version", "known"),
    [
        *((version, "measured") for version in ("4.4.2", "5.0", "6.0.27", "7.0.5", "7.0.31", [7, 0, 28])),
        *((version, "derived") for version in ("5.3.1", "6.3", "7.3.4", "8.0.12", "8.1", "8.3.0-rc1")),
        *((version, "unknown") for version in ("9.0", "9.1.2", "10.0")),
    ],
)
def test_doctor_says_what_is_known_of_a_version_and_proposes_to_compare(version: Any, known: str) -> None:
    """A series between two measured ones (6.3, 7.3) counted as measured, and 9.0 as derived: no test had used versions
    that no server here has."""
    assert knowledge_of(version) == known
    name = version if isinstance(version, str) else ".".join(map(str, version))
    finding = version_finding(name)
    assert finding.found.startswith(f"MongoDB {name}, {known}")
    assert (finding.status == "ok") == (known == "measured") == (finding.advice == "")
    assert ("tailrace compare" in finding.advice) == (known != "measured")


@pytest.mark.parametrize("version", ["8.2.0", [8, 2, 0], "8.2.0-rc1"])
def test_a_release_that_no_profile_is_right_for_is_refused_with_what_to_do(version: Any) -> None:
    with pytest.raises(UsageError, match=r"8\.2\.0 are not supported: it shows `collectionUUID`") as told:
        profile_for(version)
    assert "--server-version" in str(told.value.hint)
    assert profile_for("8.2.1").name == "8.2"


@pytest.mark.parametrize("version", ["4.2", "3.6.23", "x", "", []])
def test_a_version_too_old_or_none_at_all_is_refused(version: str) -> None:
    with pytest.raises(UsageError):
        profile_for(version)


def test_a_wrong_version_is_refused_before_anything_connects() -> None:
    with pytest.raises(UsageError, match="not supported"):
        connect("mongodb://127.0.0.1:1", server_version="4.2")
    with pytest.raises(UsageError, match="is not a server version"):
        connect("mongodb://127.0.0.1:1", server_version="newest")
    with pytest.raises(UsageError, match="server's own streams"):
        connect("mongodb://127.0.0.1:1", engine="server", server_version="6.0")


def test_the_command_line_refuses_a_wrong_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_module.main(["watch", "mongodb://127.0.0.1:1", "--server-version", "3.6"]) == 1
    assert capsys.readouterr().err == ("tailrace: MongoDB 3.6 is not supported. 4.4 is the oldest supported version.\n")


def changed(version: str) -> dict[str, object]:
    """What a server does differently at the feature compatibility version ``version``."""
    at, own = profile_for(version), profile_for(version.partition("-")[0])
    names = [column.name for column in dataclasses.fields(ServerProfile) if column.name != "compatibility"]
    return {name: getattr(at, name) for name in names if getattr(at, name) != getattr(own, name)}


def test_a_lower_feature_compatibility_version_has_a_profile_of_its_own_where_that_makes_a_difference() -> None:
    """It was not a part of any profile: 6.0 set to 5.0 gave events of 6.0."""
    assert changed("6.0.27-fcv5.0") == {"wall_time": False, "computes_post_images": False}
    assert changed("7.0.28-fcv6.0") == changed("7.0.25-fcv6.0") == {"disambiguated_paths": False}
    assert profile_for("7.0.28-fcv6.0").shows_index_builds
    for version in ("5.0.4-fcv4.4", "8.0.4-fcv7.0", "6.0.27-fcv6.0"):
        assert profile_for(version) == profile_for(version.partition("-")[0])
    assert profile_for("6.0.27-fcv5.0").name == "6.0-fcv5.0"
    assert profile_for(profile_for("7.0.28-fcv6.0").name) == profile_for("7.0.28-fcv6.0")
    assert chosen_profile("6.0-fcv5.0") == profile_for("6.0.27-fcv5.0")
    assert knowledge_of("6.0.27-fcv5.0") == "measured"
    ranks = [profile_for(version).rank for version in ("5.0.4", "6.0.27-fcv5.0", "6.0.27", "7.0.28-fcv6.0", "7.0.28")]
    assert ranks == sorted(set(ranks))


def test_the_text_of_a_version_says_a_lower_feature_compatibility_version_and_no_other() -> None:
    assert with_compatibility("6.0.27", "5.0") == "6.0.27-fcv5.0"
    assert with_compatibility("6.0.27-fcv5.0", "6.0") == "6.0.27"
    assert with_compatibility("8.0.0-rc2", "7.0") == "8.0.0-rc2-fcv7.0"
    assert [with_compatibility("6.0.27", one) for one in ("6.0", None, "10.0")] == ["6.0.27"] * 3
    assert for_people("6.0.27-fcv5.0") == "6.0.27 with the feature compatibility version 5.0"
    assert for_people("6.0.27") == "6.0.27"
    for wrong in ("6.0-fcvx", "6.0-fcv5", "6.0-fcv5.0.1"):
        with pytest.raises(UsageError, match="is not a server version"):
            profile_for(wrong)


def test_6_0_at_5_0_shows_the_wall_time_of_expanded_events_alone_and_refuses_post_images() -> None:
    profile = profile_for("6.0.27-fcv5.0")
    plain = StreamOptions.parse(Scope.cluster())
    assert not build_plan(plain, profile).shows_wall_time
    assert build_plan(plain, profile_for("6.0.27")).shows_wall_time
    expanded = StreamOptions.parse(Scope.cluster(), {"showExpandedEvents": True}, profile=profile)
    assert build_plan(expanded, profile).shows_wall_time
    for mode in ("whenAvailable", "required"):
        images = StreamOptions.parse(Scope.cluster(), {"fullDocument": mode}, profile=profile)
        with pytest.raises(UsageError, match=f"Specified value '{mode}' is not a valid option") as refused:
            build_plan(images, profile)
        assert refused.value.code == 2
        build_plan(images, profile_for("6.0.27"))
    with pytest.raises(UsageError, match="Enumeration value 'x'"):
        StreamOptions.parse(Scope.cluster(), {"fullDocument": "x"}, profile=profile)
    build_plan(StreamOptions.parse(Scope.cluster(), {"fullDocumentBeforeChange": "required"}, profile=profile), profile)


@pytest.mark.parametrize(
    ("version", "parts"),
    [("6.0", (6, 0)), ("6.0.27", (6, 0, 27)), ("6.0.27.1", (6, 0, 27)), ((7, 0, 28, 0), (7, 0, 28))],
)
def test_a_version_has_two_or_three_numbers(version: str | tuple[int, ...], parts: tuple[int, ...]) -> None:
    """A server's ``versionArray`` has four. No test had a text with four."""
    assert _parts(version) == parts
