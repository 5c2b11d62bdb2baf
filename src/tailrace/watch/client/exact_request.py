"""The parameters of ``watch()`` when exact images are requested."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pymongo.errors import ConfigurationError

from tailrace.watch.client.arguments import refused
from tailrace.watch.client.request import WatchRequest

#: Each mode of exact images, and the server's mode that the stream treats alike.
_MODES: Final = {"exact": "required", "exactWhenAvailable": "whenAvailable"}


def asks_for_exact(request: WatchRequest) -> bool:
    """Whether exact images are requested for a stream."""
    return request.full_document in _MODES or request.full_document_before_change in _MODES


def with_server_names(request: WatchRequest) -> WatchRequest:
    """The request with the server's names of the modes, which say what to do if an image is not known. Raises
    UsageError if it mixes the server's images with exact ones."""
    after, before = request.full_document, request.full_document_before_change
    if after in ("updateLookup", "whenAvailable", "required") or before in ("whenAvailable", "required"):
        raise refused(
            f"full_document {after!r} and full_document_before_change {before!r} do not go together",
            ConfigurationError,
            "Request exact images with both, or with one of them alone",
        )
    return replace(
        request,
        full_document=None if after is None else _MODES.get(after, after),
        full_document_before_change=None if before is None else _MODES.get(before, before),
    )
