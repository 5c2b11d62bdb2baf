"""The plan of a change stream in words: which stages run, and which parts of the scope and the ``$match`` are checked
where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import bson
from bson.codec_options import CodecOptions, DatetimeConversion

from tailrace.core.expression.match import tree
from tailrace.core.expression.values import value as v
from tailrace.core.oplog.cluster_time import ClusterTime
from tailrace.core.pipeline.pushdown import Conjunct, Pushdown
from tailrace.core.pipeline.pushdown.oplog_filter import kinds_read
from tailrace.core.pipeline.pushdown.query import text_of
from tailrace.core.pipeline.shard import ChangeStreamPipeline
from tailrace.core.plan.conjuncts import BEFORE_CHANGE, FULL_DOCUMENT
from tailrace.core.plan.plan import Plan

#: Where the entries come from: an oplog that can be asked a query, a dump, or the shards of a cluster, which are read
#: whole so that each of their entries is a promise.
Reads = Literal["mongod", "dump", "shards"]

_ANY_DATE: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    document_class=dict, datetime_conversion=DatetimeConversion.DATETIME_AUTO
)
_OPLOG_QUERY: Final = "oplog query"
_ENTRY_TEST: Final = "entry test"


def explain(plan: Plan, *, reads: Reads = "mongod") -> dict[str, Any]:
    """The plan as a document.

    ``stages``      the stages in order, by the server's names
    ``oplogQuery``  the filter of the read of the oplog, without its conditions on ``ts``; null: everything is read
    ``match``       each part of the user's ``$match`` stages: the query, its stage's place, and where it is asked
                    besides its own place
    ``images``      what is looked up
    ``afterTransform``  the user's stages, all of which run on the finished event
    ``reads``       the kinds of oplog entries that are read: "all", "some" or "none" of those in scope
    """
    pipeline = ChangeStreamPipeline(plan if plan.start is not None else plan.start_at(ClusterTime(1)))
    pushdown = pipeline.pushdown
    asked = pushdown.oplog_filter if reads == "mongod" else None
    nodes = [one.node for one in pushdown.on_entries] if asked is not None and pushdown.order.simple else []
    parts = [_part(one, pushdown, queried=bool(nodes)) for one in pushdown.conjuncts]
    return {
        "scope": str(plan.options.scope),
        "stages": pipeline.stage_names,
        "oplogQuery": None if asked is None else _decoded(asked),
        "match": parts,
        "images": {
            "fullDocument": _image(pushdown, FULL_DOCUMENT, plan.options.full_document),
            "fullDocumentBeforeChange": _image(pushdown, BEFORE_CHANGE, plan.options.full_document_before_change),
        },
        "afterTransform": [_decoded(stage) for stage in plan.options.pipeline],
        "reads": {"everything": "all"} if asked is None else kinds_read(plan, nodes),
    }


def explain_text(document: Mapping[str, Any], shown: Any = str) -> Iterator[str]:
    """The document of ``explain`` as lines to read. ``shown`` writes a document out."""
    yield f"change stream on {document['scope']}"
    yield "stages: " + " > ".join(document["stages"])
    if document["oplogQuery"] is None:
        yield "oplog query: no filter, every entry is read"
    else:
        yield f"oplog query: {shown(document['oplogQuery'])}"
        if document.get("oplogQuerySent") is False:
            yield "not sent at present: a thousand entries are read whole to see whether it spares more than it costs"
        yield "entries in scope that are read: " + ", ".join(f"{n}: {how}" for n, how in document["reads"].items())
    for part in document["match"]:
        where = ", ".join(part["asked"]) or "its own place only"
        yield f"$match (stage {part['stage']}) {shown(part['query']) if part['query'] else 'an expression'}: {where}"
    for name, how in document["images"].items():
        yield f"{name}: {how}"
    if document["afterTransform"]:
        yield "on the finished event: " + ", ".join(shown(stage) for stage in document["afterTransform"])


def _part(one: Conjunct, pushdown: Pushdown, *, queried: bool) -> dict[str, Any]:
    asked = []
    if one in pushdown.on_entries:
        asked = [_OPLOG_QUERY, _ENTRY_TEST] if queried else [_ENTRY_TEST]
    if pushdown.looks_up and one in pushdown.before_images:
        asked.append("before images are looked up")
    elif pushdown.looks_up and any(part in pushdown.before_images for part in one.implied()):
        asked.append("in part before images are looked up")
    if one in pushdown.between_images:
        asked.append("before the document is looked up")
    if one in pushdown.after_images or (one.moved and one in pushdown.before_images):
        asked.append("before the stages in front of it")
    fields = None if one.fields is None else sorted(name.decode("utf-8", "replace") for name in one.fields)
    return {"stage": one.stage, "query": _query(one.node), "fields": fields, "asked": asked}


def _query(node: tree.Node) -> dict[str, Any] | None:
    text = None if isinstance(node, tree.ExpressionIsTrue) else text_of(node)
    return None if text is None else _decoded(text[1])


def _image(pushdown: Pushdown, name: bytes, mode: str) -> str:
    if mode in ("default", "off"):
        return "not asked for"
    if name not in pushdown.looks_up:
        return f"{mode}, but not looked up: a stage takes it away unseen"
    early = sum(1 for one in pushdown.before_images)
    return f"{mode}, looked up" + (f" for what passes {early} part(s) of the match" if early else "")


def _decoded(document: bytes) -> dict[str, Any]:
    decoded: dict[str, Any] = bson.decode(v.stripped(document), codec_options=_ANY_DATE)
    return decoded
