"""``--explain``: the plan of a stream in the requested format."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import bson
from bson.json_util import RELAXED_JSON_OPTIONS, dumps

from tailrace.cli.output import say
from tailrace.core.pipeline.explain import explain_text


def print_explanation(document: Mapping[str, Any], form: str | None) -> None:
    """Write the document of ``tailrace.core.pipeline.explain``: lines to read, one line of extended JSON, or its
    BSON."""
    chosen = form or ("pretty" if sys.stdout.isatty() else "json")
    if chosen == "bson":
        sys.stdout.buffer.write(bson.encode(document))
        sys.stdout.buffer.flush()
        return
    lines = explain_text(document, _json) if chosen == "pretty" else [_json(document)]
    for line in lines:
        say(line)


def _json(document: Mapping[str, Any]) -> str:
    return dumps(document, json_options=RELAXED_JSON_OPTIONS)
