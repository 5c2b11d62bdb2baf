"""Damaged frames: whatever comes, the parser gives a message or raises ``BadFrame`` with a sentence.

    python -m tests.gateway.fuzz --seed 1 --cases 200000      seeded mutation of recorded messages
    python -m tests.gateway.fuzz --atheris --cases 1000000    guided by coverage, where atheris is installed

The parts into which a message is taken apart must also build the same message again.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tailrace.watch.gateway import frame
from tailrace.watch.gateway.compression import compressor_of, decompress
from tailrace.watch.gateway.frame import BadFrame, OpMsg, OpQuery, OpReply
from tests.gateway.record import recorded

_INTERESTING = (0, 1, 4, 5, 15, 16, 17, 0x7F, 0x80, 0xFF, 48_000_000, 48_000_001, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
#: The most that a compressed message of the fuzzer may hold.
_LIMIT = 1 << 20


def digest(message: bytes) -> str:
    """Take a message apart as the gateway does, as far as it goes: "parsed", or the sentence that refuses it."""
    try:
        header = frame.whole_message(message)
        if header.op_code == frame.OP_COMPRESSED:
            compressor_of(message)
            message = decompress(message, limit=_LIMIT)
            header = frame.whole_message(message)
        kinds: dict[int, Any] = {frame.OP_MSG: OpMsg, frame.OP_QUERY: OpQuery, frame.OP_REPLY: OpReply}
        kind = kinds.get(header.op_code)
        if kind is None:
            return "passed"
        parsed = kind.parse(message)
        documents = parsed.documents if isinstance(parsed, OpReply) else (parsed.document,)
        if isinstance(parsed, OpMsg):
            list(parsed.documents())
            frame.check_checksum(message)
        for document in documents:
            frame.command_name(document)
        _built_again(message, parsed, documents)
        for document in documents:
            frame.check_document(document)
    except BadFrame as refusal:
        sentence = str(refusal)
        assert sentence, "an error without a sentence"
        return sentence
    return "parsed"


def _built_again(message: bytes, parsed: Any, documents: Sequence[bytes]) -> None:
    if not documents:
        return
    again = frame.with_document(parsed, documents[0])
    if isinstance(parsed, OpMsg):
        # Without its checksum, and with the command before the sequences: the meaning is the same.
        other = OpMsg.parse(again)
        assert (other.document, other.sequences) == (parsed.document, parsed.sequences)
    elif isinstance(parsed, OpQuery):
        assert message.startswith(again[frame.HEADER_SIZE :], frame.HEADER_SIZE)  # a selector of fields may follow
    else:
        assert again == message


def mutated(message: bytes, chance: random.Random) -> bytes:
    """A damaged copy, mostly with a correct length, so that the damage is found further in."""
    data = bytearray(message)
    for _ in range(chance.choice((1, 1, 2, 4, 8))):
        at = chance.randrange(len(data)) if data else 0
        match chance.randrange(7):
            case 0 if data:
                data[at] ^= 1 << chance.randrange(8)
            case 1 if data:
                data[at] = chance.randrange(256)
            case 2 if len(data) >= 4:
                at = chance.randrange(len(data) - 3)
                struct.pack_into("<I", data, at, chance.choice(_INTERESTING))
            case 3:
                del data[at : at + chance.randrange(1, 20)]
            case 4:
                data[at:at] = chance.randbytes(chance.randrange(1, 20))
            case 5:
                begin = chance.randrange(len(data) + 1)
                data[at:at] = data[begin : begin + 40]
            case 6:
                del data[at:]
    if chance.random() < 0.9 and len(data) >= 4:
        struct.pack_into("<i", data, 0, len(data))
    return bytes(data)


def fuzz(seed: int, cases: int, look: Callable[[bytes], object] = digest) -> dict[str, int]:
    """Run ``cases`` damaged messages. Returns how many were parsed, passed and refused. Raises any other exception."""
    chance, corpus = random.Random(seed), recorded()
    found = {"parsed": 0, "passed": 0, "refused": 0}
    for number in range(cases):
        message = mutated(chance.choice(corpus), chance)
        try:
            outcome = str(look(message))
        except Exception as error:
            error.add_note(f"case {number} of seed {seed}: {message.hex()}")
            raise
        found[outcome if outcome in found else "refused"] += 1
    return found


def guided(cases: int) -> int:
    """The same, guided by the coverage of our own modules."""
    import atheris

    for name in [name for name in sys.modules if name.partition(".")[0] == "tailrace"]:
        del sys.modules[name]  # modules that are already loaded would not be instrumented
    with atheris.instrument_imports(include=["tailrace.watch.gateway", "tailrace.core.raw_bson"]):
        from tests.gateway import fuzz as instrumented

    def look(data: bytes) -> None:
        instrumented.digest(bytes(data))

    with tempfile.TemporaryDirectory() as corpus:
        for number, message in enumerate(recorded()):
            (Path(corpus) / str(number)).write_bytes(message)
        atheris.Setup([sys.argv[0], f"-runs={cases}", "-rss_limit_mb=4096", "-max_len=65536", corpus], look)
        atheris.Fuzz()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=200_000)
    parser.add_argument("--atheris", action="store_true", help="guided by coverage; needs the package atheris")
    args = parser.parse_args()
    if args.atheris:
        return guided(args.cases)
    begun = time.monotonic()
    print(f"seed {args.seed}: {fuzz(args.seed, args.cases)} in {time.monotonic() - begun:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
