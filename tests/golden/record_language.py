"""Ask the embedded servers what their languages make of ``language_cases``, and write it down.

python -m tests.golden.record_language                     all four versions (7.0.28 needs wine64)
python -m tests.golden.record_language --version 7.0.28    one of them; the others stay as they are
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bson
import bson.json_util
import pymongo
from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument

from tailrace.core.expression import compile_stages
from tailrace.errors import TailraceError
from tests.golden.language_cases import DOCUMENT, EXPRESSIONS, PIPELINES, STAGES

RECORDING = Path(__file__).with_name("data") / "language_versions.json"
VERSIONS = ("4.4.2", "5.0.4", "6.0.27", "7.0.28")
#: A code, or the bytes of the document as hexadecimal digits.
Answer = int | str
_RAW: CodecOptions[RawBSONDocument] = CodecOptions(document_class=RawBSONDocument)
_NOT_MOVED: dict[str, Any] = {"$_internalInhibitOptimization": {}}


def server_answers(uri: str) -> dict[str, list[Answer]]:
    """What the server says to every case."""
    with pymongo.MongoClient[Any](uri, directConnection=True) as client:
        database = client.get_database("language_versions", codec_options=_RAW)
        client.drop_database(database.name)
        database["c"].insert_one(DOCUMENT)

        def run(pipeline: list[Any], batch: int) -> Answer:
            try:
                reply = database.command(
                    "aggregate", "c", pipeline=pipeline, cursor={"batchSize": batch}, codec_options=_RAW
                )
            except pymongo.errors.OperationFailure as error:
                return error.code or -1
            found = reply["cursor"]["firstBatch"]
            return found[0].raw.hex() if found else 0

        opened = [run([{"$changeStream": {}}, stage], 0) for stage in STAGES]
        made = {"$replaceWith": {"$mergeObjects": ["$$ROOT"]}}
        evaluated = [run([made, _NOT_MOVED, {"$replaceWith": {"r": one}}], 1) for one in EXPRESSIONS]
        apart = [[part for stage in stages for part in (_NOT_MOVED, stage)] for stages in PIPELINES]
        piped = [run([made, *stages, _NOT_MOVED], 1) for stages in apart]
        client.drop_database(database.name)
    return {"stages": opened, "expressions": evaluated, "pipelines": piped}


def our_answers(version: tuple[int, ...]) -> dict[str, list[Answer]]:
    """What we say to every case in that version's language."""

    def opened(stage: dict[str, Any]) -> Answer:
        try:
            compile_stages([bson.encode(stage)], version=version, now=0, cluster_time=1)
        except TailraceError as error:
            return error.code or -1
        return 0

    def evaluated(stages: list[dict[str, Any]]) -> Answer:
        try:
            out = compile_stages(list(map(bson.encode, stages)), version=version, now=0).apply(bson.encode(DOCUMENT))
        except TailraceError as error:
            return error.code or -1
        return 0 if out is None else out.hex()

    return {
        "stages": list(map(opened, STAGES)),
        "expressions": [evaluated([{"$replaceWith": {"r": expression}}]) for expression in EXPRESSIONS],
        "pipelines": list(map(evaluated, PIPELINES)),
    }


def digest_of_cases() -> list[str]:
    """The cases as text, which shows whether a recording is of other cases."""
    return [bson.json_util.dumps(case, sort_keys=False) for case in [*STAGES, *EXPRESSIONS, *PIPELINES]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=VERSIONS, action="append")
    parser.add_argument("--uri", help="a running mongod of that version instead of an embedded one")
    options = parser.parse_args()
    from tailrace.embedded import ReplicaSet

    kept = json.loads(RECORDING.read_text())["answers"] if RECORDING.exists() else {}
    for version in options.version or VERSIONS:
        if options.uri:
            kept[version] = server_answers(options.uri)
        else:
            with ReplicaSet(1, version=version) as running:
                kept[version] = server_answers(running.uri)
    written = {
        "cases": digest_of_cases(),
        "answers": {version: kept[version] for version in VERSIONS if version in kept},
    }
    RECORDING.write_text(json.dumps(written, ensure_ascii=False, indent=0) + "\n")


if __name__ == "__main__":
    main()
