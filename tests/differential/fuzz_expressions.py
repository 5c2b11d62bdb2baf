"""Random stages on random documents, ours against a running mongod: the bytes that come out, and the error codes.

    python -m tests.differential.fuzz_expressions --seed 7 --n 400                 one seed, replayable
    python -m tests.differential.fuzz_expressions --seeds 1-50 --n 400             many, in one server
    python -m tests.differential.fuzz_expressions --seed 7 --n 400 --only '$dateTrunc,$add'
    python -m tests.differential.fuzz_expressions --seed 7 --n 400 --shapes --server-version 4.4.2
    python -m tests.differential.fuzz_expressions --seeds 1-50 --n 400 --collation                one for each seed
    python -m tests.differential.fuzz_expressions --seed 7 --n 400 --collation '{"locale": "sv"}'
    python -m tests.differential.fuzz_expressions --seed 7 --n 400 --matches --server-version 4.4.2

A comparison is one stage on one document: the result, that there is none, or the code of the error. A stage that does
not compile is one comparison of the code. What we refuse by name is counted separately. Exit code 1 on any difference.

For a single ``$match``, compiled code must give the same answers as the plain stages; where it does not know the
answer, the case is counted as unknown.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import bson
import numpy as np
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.core.expression import Collation, CompiledPipeline, compile_stages, parse_collation
from tailrace.core.expression.language.registry import OPERATORS
from tailrace.core.expression.language.version import knows
from tailrace.core.expression.stages.pipeline import Compiler
from tailrace.core.expression.values import value as v
from tailrace.core.expression.values.collation import order_of
from tailrace.core.kernel.match import UNKNOWN
from tailrace.core.kernel.match_program import match_program
from tailrace.core.kernel.project_program import NOT_KNOWN, PASSES
from tailrace.core.kernel.user_stages import BlockStages, compile_user_stages
from tailrace.errors import TailraceError
from tests.differential import expression_grammar as grammar
from tests.differential.expression_values import Collated, whole_document
from tests.server_in_use import SERVER_VERSION

NOT_SUPPORTED = 115
#: The result of a stage that killed the server, which is counted and not compared.
CRASHED = -3
#: Found when an event is written (nesting, size): blocks look for it together with the resume token, which is not here.
WHEN_WRITTEN = (15, 13548)
_RAW = CodecOptions(document_class=RawBSONDocument, unicode_decode_error_handler="replace")
#: The largest number of failing documents that is examined for one stage; most of them fail for the same reason.
MAX_FAILURES = 3

#: The collations of the fuzz with ``--collation``, one for each seed in turn.
COLLATIONS: list[dict[str, Any]] = [
    {"locale": "en", "strength": 1},
    {"locale": "en", "strength": 2},
    {"locale": "en"},
    {"locale": "fr_CA"},
    {"locale": "de@collation=phonebook", "strength": 1},
    {"locale": "sv", "strength": 2},
    {"locale": "en", "strength": 1, "caseLevel": True},
    {"locale": "en", "numericOrdering": True},
    {"locale": "en", "alternate": "shifted", "strength": 3},
    {"locale": "en", "alternate": "shifted", "maxVariable": "space", "strength": 4},
    {"locale": "da", "strength": 3},
    {"locale": "en", "caseFirst": "lower", "strength": 5},
    {"locale": "tr", "strength": 2, "normalization": True},
    {"locale": "es@collation=traditional", "strength": 1},
    {"locale": "ja", "strength": 4},
    {"locale": "hr", "backwards": True, "strength": 2},
]

#: A mongod for Windows computes these with another C library than one for Linux, so the last digit may differ. (That
#: goes for 7.0.28 under Wine too.)
_C_LIBRARY = "acos acosh asin asinh atan atan2 atanh cos cosh exp ln log log10 pow sin sinh tan tanh"
OF_THE_C_LIBRARY = frozenset(f"${name}" for name in _C_LIBRARY.split())

Outcome = bytes | int | None


@dataclass
class Totals:
    """What was compared, and the first differences in words."""

    comparisons: int = 0
    compiled: int = 0
    stages: int = 0
    refused: int = 0
    errors: Counter[int] = field(default_factory=Counter)
    operators: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    #: Documents that a single ``$match`` was asked of: those that compiled code answers, and those that it does not.
    decided: int = 0
    unknown: int = 0

    @property
    def share_unknown(self) -> float:
        return self.unknown / max(1, self.decided + self.unknown)

    def __str__(self) -> str:
        return (
            f"{self.comparisons} comparisons of {self.stages} stages, {self.compiled} results of blocks, "
            f"{sum(self.errors.values())} errors of "
            f"{len(self.errors)} codes, {self.refused} refused by name, {len(self.crashes)} that killed the server, "
            f"{len(self.differences)} differences; compiled code answers {self.decided} questions and leaves "
            f"{self.unknown} ({self.share_unknown:.1%})"
        )


class Server:
    """The server's side: a collection of documents, and stages run over a range of them."""

    def __init__(self, uri: str, revive: Callable[[], object] | None = None) -> None:
        self.collation: dict[str, Any] | None = None
        self.revive = revive
        self.crashes = 0
        self.client: pymongo.MongoClient[Any] = pymongo.MongoClient(uri, directConnection=True)
        about = self.client.server_info()
        #: The first three numbers of the version, as in a plan's profile.
        self.version = tuple(about["versionArray"][:3])
        #: The operators that it knows, without those whose last digit is that of its own C library.
        self.operators = {name for name, operator in OPERATORS.items() if knows(self.version, operator.since)}
        self.is_for_windows = about["buildEnvironment"].get("target_os") == "windows"
        if self.is_for_windows:
            self.operators -= OF_THE_C_LIBRARY
        self.database = self.client.get_database("tailrace_expressions", codec_options=_RAW)

    def load(self, documents: list[bytes]) -> None:
        self.database.drop_collection("documents")
        self.database.documents.insert_many([RawBSONDocument(document) for document in documents])

    def run(self, stages: list[bytes], low: int, high: int) -> list[bytes] | int:
        """What the stages give for the documents ``low <= _id < high`` in order, or the code of the error."""
        pipeline = [
            {"$match": {"_id": {"$gte": low, "$lt": high}}},
            {"$sort": {"_id": 1}},
            # an event is a document made by a stage before, not one read from a collection: that shows in field order
            {"$replaceWith": {"$mergeObjects": ["$$ROOT"]}},
            {"$_internalInhibitOptimization": {}},
            *[step for stage in stages for step in (RawBSONDocument(stage), {"$_internalInhibitOptimization": {}})],
        ]
        try:
            reply = self.database.command(
                "aggregate",
                "documents",
                pipeline=pipeline,
                cursor={"batchSize": 10000},
                collation=self.collation or {"locale": "simple"},
                codec_options=_RAW,
            )
        except pymongo.errors.OperationFailure as error:
            return error.code or -1
        except pymongo.errors.AutoReconnect:
            if self.revive is None:
                raise
            self.crashes += 1  # mongod 6.0.27 dies of a null pointer in some expressions
            self.revive()
            return CRASHED
        return [document.raw for document in reply["cursor"]["firstBatch"]]


def _constant_failures(stages: list[bytes], collation: Collation | None, version: tuple[int, ...]) -> set[int | None]:
    """The codes of all constant parts that fail, if everything else parses. Which of them the server reports depends on
    the order of a hash table: any of them will do, and no other."""
    compiler = Compiler({"REMOVE": None}, stages, order_of(collation), version)
    try:
        for place in range(len(stages)):
            compiler.stage(place)
    except TailraceError:
        return set()
    return {failure.code for failure in compiler.failures} if len(compiler.failures) > 1 else set()


def ours(pipeline: CompiledPipeline, document: bytes) -> Outcome:
    try:
        return pipeline.apply(document)
    except TailraceError as error:
        return error.code or -2


def compare_stage(server: Server, stages: list[bytes], documents: list[bytes], totals: Totals) -> None:
    totals.stages += 1
    collation = None if server.collation is None else parse_collation(bson.encode(server.collation))
    try:
        pipeline = compile_stages(stages, collation=collation, version=server.version)
    except TailraceError as error:
        if error.code == NOT_SUPPORTED:
            totals.refused += 1
            return
        theirs = server.run(stages, 0, len(documents))
        if theirs == CRASHED:
            totals.crashes.append(_shown(stages))
            return
        totals.comparisons += 1
        totals.errors[error.code or -2] += 1
        if theirs != error.code and (
            isinstance(theirs, list) or theirs not in _constant_failures(stages, collation, server.version)
        ):
            _differ(totals, stages, None, f"{error.code} {error.message} ({error.hint})", theirs)
        return
    outcomes = [ours(pipeline, document) for document in documents]
    if collation is None and len(stages) == 1 and pipeline.stages[0].name == "$match":
        outcomes = _by_compiled_code(pipeline, documents, outcomes, stages, totals)
    blocks = compile_user_stages(pipeline, collated=collation is not None)
    if blocks is not None:
        compare_blocks(blocks, stages, documents, outcomes, totals)
    low, failures = 0, 0
    before = len(totals.differences)
    while low < len(documents) and failures <= MAX_FAILURES and len(totals.differences) == before:
        failing = next((at for at in range(low, len(documents)) if isinstance(outcomes[at], int)), len(documents))
        if failing > low:
            _compare_range(server, stages, documents, outcomes, span=(low, failing), totals=totals)
        if failing < len(documents):
            if outcomes[failing] == NOT_SUPPORTED:
                totals.refused += 1
            else:
                _compare_range(server, stages, documents, outcomes, span=(failing, failing + 1), totals=totals)
            failures += 1
        low = failing + 1


def _by_compiled_code(
    pipeline: CompiledPipeline, documents: list[bytes], plain: list[Outcome], stages: list[bytes], totals: Totals
) -> list[Outcome]:
    """What compiled code gives, and the plain stages where it does not know. A difference between them is noted."""
    node = pipeline.stages[0].parsed
    program = match_program(node)  # type: ignore[arg-type]
    if program is None:
        totals.unknown += len(documents)
        return plain
    offsets = np.cumsum([0] + [len(document) for document in documents])
    answers = program.answers(b"".join(documents), offsets).tolist()
    result: list[Outcome] = []
    for document, answer, outcome in zip(documents, answers, plain, strict=True):
        known = answer != UNKNOWN
        result.append((document if answer == PASSES else None) if known else outcome)
        totals.decided += known
        totals.unknown += not known
        if result[-1] != outcome:
            _differ(totals, stages, document, f"compiled {answer == PASSES}, plain {_shown(outcome)}", "not asked")
    return result


def compare_blocks(
    blocks: BlockStages, stages: list[bytes], documents: list[bytes], outcomes: list[Outcome], totals: Totals
) -> None:
    """The same stages over all documents at once: they must give what each document gives by itself, which is compared
    with the server. From the first error on nothing is given, so each document is also tried as a block of its own."""
    spans = [(0, len(documents)), *((at, at + 1) for at in range(len(documents)))]
    for low, high in spans if any(isinstance(outcome, int) for outcome in outcomes) else spans[:1]:
        part = documents[low:high]
        offsets = np.cumsum([0] + [len(document) for document in part])
        made = blocks.run(np.frombuffer(b"".join(part), np.uint8), offsets, None, None)
        for at, verdict in enumerate(made.verdict.tolist()):
            mine = made.buffer[made.offsets[at] : made.offsets[at + 1]].tobytes() if verdict == PASSES else None
            if outcomes[low + at] in WHEN_WRITTEN:
                continue
            known = verdict != NOT_KNOWN
            totals.compiled += known
            alone = high == low + 1 and not known and not isinstance(outcomes[low], int)
            if alone or (known and mine != outcomes[low + at]):
                _differ(totals, stages, documents[low + at], mine, outcomes[low + at])
                return


def _compare_range(
    server: Server,
    stages: list[bytes],
    documents: list[bytes],
    outcomes: list[Outcome],
    *,
    span: tuple[int, int],
    totals: Totals,
) -> None:
    low, high = span
    theirs = server.run(stages, low, high)
    mine = [outcome for outcome in outcomes[low:high] if outcome is not None]
    if theirs == CRASHED:
        totals.crashes.append(_shown(stages))
        return
    equal = theirs == mine
    if isinstance(theirs, int):
        equal = len(mine) == 1 and high == low + 1 and mine[0] == theirs
    totals.comparisons += high - low
    if equal:
        totals.errors.update([theirs] if isinstance(theirs, int) else [])
        return
    if high - low > 1:
        totals.comparisons -= high - low
        middle = (low + high) // 2
        before = len(totals.differences)
        _compare_range(server, stages, documents, outcomes, span=(low, middle), totals=totals)
        if len(totals.differences) == before:
            _compare_range(server, stages, documents, outcomes, span=(middle, high), totals=totals)
        return
    single = outcomes[low]
    _differ(totals, stages, documents[low], single, theirs)


def _differ(totals: Totals, stages: list[bytes], document: bytes | None, mine: object, theirs: object) -> None:
    shown = [f"stages   {[_shown(stage) for stage in stages]}"]
    if document is not None:
        shown.append(f"document {_shown(document)}")
    shown.append(f"ours     {_shown(mine)}")
    shown.append(f"server   {_shown(theirs)}")
    totals.differences.append("\n".join(shown))


def _shown(value: object) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, bytes):
        try:
            return repr(bson.decode(value))
        except Exception:  # noqa: BLE001  only for a reader's eyes: DBPointers do not decode as an array's member
            return value.hex()
    return repr(value)


def _storable(document: bytes) -> bytes:
    """Without top-level names that begin with a dollar, which 4.4 does not store."""
    fields = [(name, (kind, data)) for name, kind, data in v.fields_of(document) if name[:1] != b"$"]
    return v.object_of(fields)[1]


def fuzz(
    server: Server,
    seed: int,
    count: int,
    *,
    only: frozenset[str] = frozenset(),
    size: int = 24,
    shapes: bool = False,
    collation: dict[str, Any] | None = None,
    matches: bool = False,
) -> Totals:
    """``count`` random stages over ``size`` random documents, all from ``seed``, compared under ``collation``.
    ``matches``: of ``$match`` alone, with expressions that every server knows."""
    rng = random.Random(seed) if collation is None else Collated(seed)
    server.collation = collation
    documents = [whole_document(rng, number) for number in range(size)]
    if matches or shapes:
        documents = [_storable(document) for document in documents]
    server.load(documents)
    totals = Totals()
    for _ in range(count):
        if shapes:
            stages = grammar.shapes(rng)
        else:
            stages = (
                [grammar.match(rng, documents)] if matches else grammar.pipeline(rng, documents, only, server.operators)
            )
        totals.operators.update(grammar.operators_of(stages))
        compare_stage(server, stages, documents, totals)
    return totals


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--seeds", help="a range such as 1-50")
    parser.add_argument("--n", type=int, default=400, help="stages a seed")
    parser.add_argument("--only", default="", help="expressions built around these operators alone, comma-separated")
    parser.add_argument("--collation", nargs="?", const="", metavar="JSON", help="compare strings under a collation")
    parser.add_argument("--matches", action="store_true", help="$match alone, as every server version knows it")
    parser.add_argument("--server-version", help=f"of the embedded mongod ({SERVER_VERSION})")
    parser.add_argument("--shapes", action="store_true", help="only stages that have a block program on every server")
    parser.add_argument("--uri", help="a running mongod instead of an embedded one")
    parser.add_argument("--show", type=int, default=10, help="how many differences to print")
    options = parser.parse_args(arguments)
    low, _, high = (options.seeds or str(options.seed or 1)).partition("-")
    only = frozenset(filter(None, options.only.split(",")))
    if options.uri:
        return _run(Server(options.uri), range(int(low), int(high or low) + 1), options, only)
    from tailrace.embedded import ReplicaSet

    with ReplicaSet(1, version=options.server_version) as replica_set:
        server = Server(replica_set.uri, revive=lambda: replica_set.restart(0))
        return _run(server, range(int(low), int(high or low) + 1), options, only)


def _run(server: Server, seeds: range, options: argparse.Namespace, only: frozenset[str]) -> int:
    whole = Totals()
    for seed in seeds:
        collation = None
        if options.collation is not None:
            collation = json.loads(options.collation) if options.collation else COLLATIONS[seed % len(COLLATIONS)]
        shapes, matches = options.shapes, options.matches
        totals = fuzz(server, seed, options.n, only=only, shapes=shapes, collation=collation, matches=matches)
        for difference in totals.differences[: max(0, options.show - len(whole.differences))]:
            print(f"seed {seed}{f' collation {collation}' if collation else ''}\n{difference}\n", flush=True)
        for name in ("comparisons", "compiled", "stages", "refused", "decided", "unknown"):
            setattr(whole, name, getattr(whole, name) + getattr(totals, name))
        whole.errors += totals.errors
        whole.operators += totals.operators
        whole.differences += totals.differences
        whole.crashes += totals.crashes
    for crash in whole.crashes[: options.show]:
        print(f"killed the server: {crash}")
    print(f"{len(seeds)} seeds, {len(whole.operators)} operators and stages used: {whole}")
    return 1 if whole.differences else 0


if __name__ == "__main__":
    sys.exit(main())
