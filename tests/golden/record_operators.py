"""Ask the embedded servers what each operator makes of ``operator_cases``, and write it down.

python -m tests.golden.record_operators                        all four versions (7.0.28 needs wine64)
python -m tests.golden.record_operators --version 7.0.28       one of them; the others stay as they are
python -m tests.golden.record_operators --only '$mod,$week'    these operators; what is known of the others stays
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bson

from tailrace.core.expression import compile_stages
from tailrace.core.expression.language.registry import OPERATORS
from tailrace.core.expression.language.version import knows
from tailrace.core.expression.values import value as v
from tailrace.errors import TailraceError
from tests.differential.fuzz_expressions import CRASHED, Server
from tests.golden.operator_cases import forms_of

RECORDING = Path(__file__).with_name("operators.bson.xz")
VERSIONS = ("4.4.2", "5.0.4", "6.0.27", "7.0.28")
#: A code, or the bytes of the document that holds the result, or none, as ``r``.
Answer = int | bytes


def parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def known_to(version: str) -> list[str]:
    """The operators that a server of the version has. That it refuses the others is a matter of ``language_cases``."""
    return sorted(name for name, operator in OPERATORS.items() if knows(parts(version), operator.since))


def digest_of(name: str) -> str:
    """A digest of an operator's cases, which shows whether a recording is of other cases."""
    digest = hashlib.sha256()
    for form in forms_of(name):
        digest.update(form.stage())
        for document in form.documents:
            digest.update(document)
    return digest.hexdigest()[:16]


def server_answers(server: Server, names: Iterable[str]) -> dict[str, list[Answer]]:
    """What the server makes of every case of the operators."""
    asked = [(name, form, list(form.documents)) for name in names for form in forms_of(name)]
    numbered = enumerate(document for *_, documents in asked for document in documents)
    server.load([_with_id(number, document) for number, document in numbered])
    answers: dict[str, list[Answer]] = {}
    low = 0
    for name, form, documents in asked:
        answers.setdefault(name, []).extend(server_answers_of_stage(server, form.stage(), low, low + len(documents)))
        low += len(documents)
    return answers


def _with_id(number: int, document: bytes) -> bytes:
    fields = ((name, (kind, data)) for name, kind, data in v.fields_of(document))
    return v.object_of([(b"_id", v.int32(number)), *fields])[1]


def server_answers_of_stage(server: Server, stage: bytes, low: int, high: int) -> list[Answer]:
    """The answers for the documents ``low <= _id < high``: an error ends an aggregation, so halves are asked anew."""
    found = server.run([stage], low, high)
    if isinstance(found, list):
        assert len(found) == high - low
        return list(found)
    assert found != CRASHED, f"{bson.decode(stage)} ended the server"
    if high - low == 1:
        return [found]
    middle = (low + high) // 2
    return server_answers_of_stage(server, stage, low, middle) + server_answers_of_stage(server, stage, middle, high)


def our_answers(version: str, name: str) -> list[Answer]:
    """What we make of an operator's cases in that version's language."""
    answers: list[Answer] = []
    for form in forms_of(name):
        documents = list(form.documents)
        try:
            pipeline = compile_stages([form.stage()], version=parts(version), now=0)
        except TailraceError as error:
            answers += [error.code or -1] * len(documents)
            continue
        for document in documents:
            try:
                made = pipeline.apply(document)
            except TailraceError as error:
                answers.append(error.code or -1)
            else:
                assert made is not None
                answers.append(made)
    return answers


def read() -> dict[str, Any]:
    """``digests`` by operator, and by version and operator the ``answers``."""
    return bson.decode(lzma.decompress(RECORDING.read_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", choices=VERSIONS, action="append")
    parser.add_argument("--only", default="", help="operators, comma-separated")
    options = parser.parse_args()
    from tailrace.embedded import ReplicaSet

    kept = read()["answers"] if RECORDING.exists() else {}
    only = set(filter(None, options.only.split(",")))
    for version in options.version or VERSIONS:
        names = [name for name in known_to(version) if not only or name in only]
        if not names:
            continue  # none of them was there yet
        with ReplicaSet(1, version=version) as running:
            server = Server(running.uri, revive=lambda running=running: running.restart(0))  # type: ignore[misc]
            found = {**kept.get(version, {}), **server_answers(server, names)}
        kept[version] = {name: found[name] for name in known_to(version) if name in found}
        written = {"digests": {name: digest_of(name) for name in sorted(OPERATORS)}, "answers": kept}
        RECORDING.write_bytes(lzma.compress(bson.encode(written), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
