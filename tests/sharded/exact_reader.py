"""A program that reads a stream with exact images and may be killed at any moment: when started again, it goes on after
its last event.

    python -m tests.sharded.exact_reader URI DIRECTORY FILE DATABASE [SECONDS,INCREMENT]

The stream begins now, or at the time that is given. ``FILE`` gets the token at which it began, as the ``_id`` of a
document, and then the events. The program ends after the insert of the document with the ``_id`` "end".
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bson
from bson.raw_bson import RawBSONDocument
from bson.timestamp import Timestamp

import tailrace

EXACT: dict[str, Any] = {"full_document": "exact", "full_document_before_change": "exact"}


def records(file: Path) -> list[bytes]:
    """The complete documents in a file, whose last one may be cut off."""
    data, found = file.read_bytes() if file.exists() else b"", []
    while len(data) >= 4 and len(data) >= (size := int.from_bytes(data[:4], "little")):
        found.append(data[:size])
        data = data[size:]
    return found


def main(uri: str, directory: str, file: Path, database: str, start: str | None = None) -> None:
    """Read until the end."""
    whole = records(file)
    begins: dict[str, Any] = {}
    if whole:
        begins["resume_after"] = RawBSONDocument(whole[-1])["_id"]
    elif start is not None:
        begins["start_at_operation_time"] = Timestamp(*map(int, start.split(",")))
    with (
        file.open("ab") as out,
        # On a loaded machine a member that was killed is away for longer than a client's own 30 s.
        tailrace.connect(
            uri, images=directory, document_class=RawBSONDocument, serverSelectionTimeoutMS=300_000
        ) as client,
        client[database]["orders"].watch(**EXACT, max_await_time_ms=50, **begins) as stream,
    ):
        out.truncate(sum(map(len, whole)))
        if not whole:
            out.write(bson.encode({"_id": stream.resume_token}))
            out.flush()
        for event in stream:
            out.write(event.raw)
            out.flush()  # now the operating system has it, so killing this process does not lose it
            if event["operationType"] == "insert" and event["documentKey"]["_id"] == "end":
                return


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
