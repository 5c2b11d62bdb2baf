"""What is declared, what is masked, and what is refused: golden values, events, old servers' updates."""

from __future__ import annotations

import json
import pickle
from datetime import datetime
from pathlib import Path
from typing import Any

import bson
import pytest
from bson.json_util import loads

from tailrace.cli.main import main
from tailrace.consumer.messages import ChangeMessages, DebeziumMessages
from tailrace.core.event.quarantined import QuarantinedEvent
from tailrace.core.masking.events import MaskSet
from tailrace.core.masking.rules import MaskRules
from tailrace.core.masking.values import MaskKey
from tailrace.core.oplog.stored_document import apply_operation
from tailrace.errors import UsageError
from tailrace.lake.tables.masking import masked_changes
from tailrace.masks import MaskRefusedError, Masks
from tailrace.read.window.apply import DELETE, DELETE_OF, TimedChange
from tests.masks.random_updates import SECRET

#: Tokens and hashes stay the same across releases, so that users can join on them.
GOLDEN = [
    (
        "text",
        "0c84996538524153e4a347275c91ff14575a2e9076805bf51a736025366e2a8d",
        "tok1_9UY6A0FDBYrU0V7G6SmKvJmyJtM0GnGlfJM",
    ),
    ("", "e998362e3ea50d4295f1bf95836c1afea0a8a9adc14cd30544596278b16c9e2d", "tok1_Dv0nrlKkjiMzQkohXwD3nIWNU0hs6g"),
    (7, "a156102ad2dc139a077ed6c456a4397d1d7f9c39f9e87e934eaf2244b25ab2e4", "tok1_U8GxDoi29AZcDk-8q4y7DaQucuBa"),
    (
        bson.Int64(7),
        "c732feacefe4fa2614dd38f95ceb482ae253f6d1796280046e1bc5c872a28395",
        "tok1_VarJeGc2quxH42W8L4cTIyINQJ14C1e6Xw",
    ),
    (
        7.0,
        "957f54ced3069d1dbfd0b7b76ba0aebc8e31b1b25eca25d5230022ba91ef20ca",
        "tok1_BtayxIUeOOtrxbC9GcfvHhGs05EuN0773w",
    ),
    (True, "aca33f4c0b0e4d300d3f227eeaa5fdaa582cb305bba5362f7a328d1a85868794", "tok1_WsqWGzToxwsbnJTClA8Vw5h4"),
    (
        bson.Decimal128("1.10"),
        "d43e4fda80d6907b4726542c9ea447ddc756e46cac3254fc6a156d28936d7fda",
        "tok1_ilUu3domelo6N7D7-aizyKFvEzetWaZXrwgzMgQP1kQ_",
    ),
    (
        bson.ObjectId("65a1b2c3d4e5f60718293a4b"),
        "c312cd266d60d444b9f64fa90bc14f85f4a2d493872967a814c4968010dd6f60",
        "tok1_YHTAFuEIoxr4iYgGq1ab-vm2LA5IkfexUSu4I5M",
    ),
    (
        b"\x00\x01",
        "d1a9d16b523075c40ad1ffc5962b115369466701dbec465ecdc498e1f62a0da5",
        "tok1_OaCU4ppQOkGNSkHbL9yrdlkcLfL9620J",
    ),
    (
        datetime(2026, 11, 27),
        "7282467cf6948db53e5613956389ee7c8698ad2af7f69f7534fc7322e1fba850",
        "tok1_DhLAWgI7eawrXA_TT4vxUkeOaNKcWxS_KQ",
    ),
]
EVENT: dict[str, Any] = {
    "_id": {"_data": "8265"},
    "operationType": "insert",
    "clusterTime": bson.Timestamp(1, 1),
    "fullDocument": {"_id": 1, "email": "SECRET"},
    "ns": {"db": "shop", "coll": "c"},
    "documentKey": {"_id": 1},
}


def masks(rules: dict[str, str], pattern: str = "shop.*") -> MaskSet:
    return MaskSet(MaskRules.of({pattern: rules}), MaskKey(SECRET))


def masked(rules: dict[str, str], **event: Any) -> dict[str, Any]:
    return bson.decode(masks(rules).event(bson.encode({**EVENT, **event})))


def declared(folder: Path, rules: Any, suffix: str = "json") -> Path:
    (folder / "mask.key").write_bytes(SECRET)
    file = folder / f"masks.{suffix}"
    texts = {
        "json": json.dumps({"key": {"file": "mask.key"}, "rules": rules}),
        "yaml": f"masks: {{key: {{file: mask.key}}, rules: {json.dumps(rules)}}}",
        "toml": "[key]\nfile = 'mask.key'\n[rules.'shop.c']\nemail = 'hash'\n",
    }
    file.write_text(texts[suffix])
    return file


@pytest.mark.parametrize(("value", "hashed", "token"), GOLDEN, ids=lambda one: str(one)[:12])
def test_hashes_and_tokens_stay_what_they_are(value: Any, hashed: str, token: str) -> None:
    key, raw = MaskKey(SECRET), bson.encode({"": value})
    content = raw[4:5] + raw[6:-1]
    assert (key.hashed(content).decode(), key.token(content).decode()) == (hashed, token)
    kind, found = key.revealed(token)
    assert bson.decode(_document(kind, found))[""] == value


def _document(kind: int, value: bytes) -> bytes:
    body = bytes([kind, 0]) + value + b"\0"
    return (len(body) + 4).to_bytes(4, "little") + body


@pytest.mark.parametrize("suffix", ["json", "yaml", "toml"])
def test_a_declaration_is_read_from_each_form(tmp_path: Path, suffix: str) -> None:
    found = Masks.load(declared(tmp_path, {"shop.c": {"email": "hash"}}, suffix))
    assert found.witness == masks({"email": "hash"}, "shop.c").witness
    assert pickle.loads(pickle.dumps(found)) == found
    assert Masks.from_text(found.to_json()) == found
    assert SECRET not in pickle.dumps(found) + found.to_json().encode() + repr(found.compiled._key).encode()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "must map collections"),
        ({"shop.c": {}}, "must map paths"),
        ({"shop.c": {"x": "hsah"}}, "Did you mean 'hash'"),
        ({"shop.c": {"x": 1}}, "actions are"),
        ({"shop": {"x": "drop"}}, "names no collections"),
        ({"shop.c": {"_id": "hash"}}, "reaches _id"),
        ({"shop.c": {"_id.x": "hash"}}, "reaches _id"),
        ({"shop.c": {"**._id": "hash"}}, "reaches _id"),
        ({"shop.c": {"a.0": "hash"}}, "names a position"),
        ({"shop.c": {"a..b": "hash"}}, "empty name"),
        ({"shop.c": {"a*": "hash"}}, "part of a name"),
        ({"shop.c": {5: "hash"}}, "a path is text"),
    ],
)
def test_a_wrong_rule_is_told(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("*", r"\*")):
        MaskRules.of(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rules": {"a.b": {"x": "hash"}}}, "have no key"),
        ({"rules": {"a.b": {"x": "hash"}}, "key": "text"}, "never the key itself"),
        ({"rules": {"a.b": {"x": "hash"}}, "key": {"file": "none"}}, "cannot read the key"),
        ({"rules": {"a.b": {"x": "hash"}}, "key": {"environment": "TAILRACE_NO_SUCH"}}, "is not set"),
        ({"rules": {"a.b": {"x": "hash"}}, "keys": 1}, "unknown key 'masks.keys'"),
    ],
)
def test_a_wrong_declaration_is_told(given: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        _ = Masks.of(given, tmp_path).compiled


def test_a_short_key_and_one_that_has_changed_are_refused(tmp_path: Path) -> None:
    found = Masks.load(declared(tmp_path, {"shop.c": {"email": "hash"}})).pinned()
    (tmp_path / "mask.key").write_text("short")
    with pytest.raises(UsageError, match="fewer than 16 bytes"):
        _ = Masks.from_text(found.to_json()).compiled
    (tmp_path / "mask.key").write_text("another key of the same kind")
    with pytest.raises(UsageError, match="has changed"):
        _ = Masks.from_text(found.to_json()).compiled


def test_the_strongest_action_counts() -> None:
    found = masked({"email": "tokenise", "**": "hash"})["fullDocument"]
    assert found["_id"] == 1
    assert len(found["email"]) == 64
    assert masked({"*": "hash", "email": "drop"})["fullDocument"] == {"_id": 1}


def test_what_stands_in_the_token_is_refused() -> None:
    with pytest.raises(MaskRefusedError, match=r"masks of shop.c reach _id") as refused:
        masked(
            {"**.email": "hash"}, fullDocument={"_id": {"email": "SECRET"}}, documentKey={"_id": {"email": "SECRET"}}
        )
    with pytest.raises(MaskRefusedError, match=r"reach customer.email, .* shard key") as of_key:
        masked({"customer": "hash"}, documentKey={"customer.email": "SECRET", "_id": 1})
    assert "SECRET" not in f"{refused.value}{of_key.value}"
    mask = masks({"k": "hash"}).of("shop.c")
    change: TimedChange = (DELETE_OF, bson.encode({"_id": 1, "k": "SECRET"}), 1)
    with pytest.raises(MaskRefusedError, match="reach k"):
        masked_changes(mask, [change])
    assert masked_changes(mask, [(DELETE, change[1], 1)]) == [(DELETE, change[1], 1)]


@pytest.mark.parametrize(
    "event",
    [
        {"ns": None},
        {"ns": {"coll": "c"}},
        {"ns": {"db": "shop"}},
        {"documentKey": None},
        {"unheard": "SECRET"},
        {"fullDocument": "SECRET"},
        {"updateDescription": {"unheard": "SECRET"}},
    ],
)
def test_an_event_of_an_unknown_shape_is_refused(event: dict[str, Any]) -> None:
    given = {name: value for name, value in {**EVENT, **event}.items() if value is not None}
    with pytest.raises(MaskRefusedError) as refused:
        masks({"email": "hash"}).event(bson.encode(given))
    assert "SECRET" not in str(refused.value)


def test_other_collections_and_events_without_values_stay() -> None:
    found = masks({"email": "hash"}, "shop.c")
    for event in (
        {**EVENT, "ns": {"db": "shop", "coll": "d"}, "unheard": 1},
        {"_id": {"_data": "82"}, "operationType": "invalidate", "clusterTime": bson.Timestamp(1, 1)},
        {"_id": {"_data": "82"}, "operationType": "dropDatabase", "ns": {"db": "shop"}},
    ):
        raw = bson.encode(event)
        assert found.event(raw) is raw


def test_definitions_show_no_values() -> None:
    index = {"v": 2, "key": {"email": 1}, "name": "i", "partialFilterExpression": {"email": "SECRET"}}
    event = {
        "operationType": "modify",
        "fullDocument": None,
        "documentKey": None,
        "operationDescription": {"validator": {"email": "SECRET"}, "validationLevel": "off", "index": index},
        "stateBeforeChange": {"collectionOptions": {"uuid": bson.Binary(b"u"), "validator": {"$or": ["SECRET"]}}},
    }
    given = {name: value for name, value in {**EVENT, **event}.items() if value is not None}
    found = bson.decode(masks({"email": "hash"}).event(bson.encode(given)))
    shown = {name: index[name] for name in ("v", "key", "name")}
    assert found["operationDescription"] == {"validationLevel": "off", "index": shown}
    assert found["stateBeforeChange"] == {"collectionOptions": {"uuid": b"u"}}
    view = {"operationType": "create", "ns": {"db": "shop", "coll": "v"}}
    view["operationDescription"] = {"viewOn": "c", "pipeline": [{"$match": {"email": "SECRET"}}]}
    assert "SECRET" not in str(bson.decode(masks({"email": "hash"}, "shop.c").event(bson.encode(view))))


def test_what_is_put_aside_is_masked_and_says_no_reason() -> None:
    aside = QuarantinedEvent("8265", "shop.c", bson.encode(EVENT), "cannot parse 'SECRET'", 241)
    found = masks({"email": "drop"}).quarantined(aside)
    assert "SECRET" not in str(found)
    assert (found.token, found.code) == ("8265", 241)
    other = QuarantinedEvent("8265", "b.c", bson.encode({**EVENT, "ns": {"db": "b", "coll": "c"}}), "why", 241)
    assert masks({"email": "drop"}).quarantined(other) == other


@pytest.mark.parametrize(
    ("change", "after"),
    [
        ({"$v": 1, "$set": {"email": "x", "n": 5}}, {"_id": 1, "n": 5, "card": {"no": "x", "n": 1}}),
        ({"$set": {"card.n": 2}, "$unset": {"email": True}}, {"_id": 1, "n": 1, "card": {"no": "x", "n": 2}}),
        ({"$unset": {"email": True}}, {"_id": 1, "n": 1, "card": {"no": "x", "n": 1}}),
        ({"_id": 1, "email": "x", "n": 3}, {"_id": 1, "n": 3}),
    ],
)
def test_updates_of_older_servers(change: dict[str, Any], after: dict[str, Any]) -> None:
    mask = masks({"email": "drop", "card.no": "drop"}).of("shop.c")
    assert mask is not None
    document = {"_id": 1, "email": "e", "n": 1, "card": {"no": "x", "n": 1}}
    del after.get("card", {"no": 1})["no"]
    raw = bson.encode(change)
    made = apply_operation(mask.document(bson.encode(document)), b"u", mask.update(raw))
    assert bson.decode(made or b"") == after
    with pytest.raises(MaskRefusedError, match=r"reach card\.no"):
        mask.update(bson.encode({"$set": {"card.no": "x"}}))


class OneChange:
    raw = bson.encode(EVENT)


def test_messages_are_made_of_masked_events(tmp_path: Path) -> None:
    found = Masks.load(declared(tmp_path, {"shop.c": {"email": "tokenise"}}))
    plain, masked = ChangeMessages("t")(OneChange()), ChangeMessages("t", masks=found)(OneChange())
    assert plain is not None
    assert masked is not None
    assert "SECRET" in str(plain)
    assert "SECRET" not in str(masked)
    assert (plain.id, plain.key) == (masked.id, masked.key)
    (record,) = DebeziumMessages("p", masks=found)(OneChange())
    assert b"SECRET" not in (record.body or b"")
    token = loads(masked.body or b"")["fullDocument"]["email"]
    assert found.revealed(token) == "SECRET"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = declared(tmp_path, {"shop.c": {"email": "tokenise"}})
    token = MaskKey(SECRET).token(b"\x10\x07\0\0\0").decode()
    assert main(["mask", "reveal", "--masks", str(file), token]) == 0
    assert capsys.readouterr().out == "7\n"
    assert main(["mask", "check", "--masks", str(file)]) == 0
    assert capsys.readouterr().out.startswith("rules ")
    for wrong in ("text", token[:-4] + "AAAA", "tok1_*"):
        assert main(["mask", "reveal", "--masks", str(file), wrong]) == 1
        assert "Traceback" not in capsys.readouterr().err
