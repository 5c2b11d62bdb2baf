"""What a request for a stream asks for, checked, and what such a stream reads."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.core.plan.options import StreamOptions
from tailrace.core.plan.plan import Plan
from tailrace.core.plan.profile import ServerProfile
from tailrace.watch.client.request import WatchRequest


def checked_options(request: WatchRequest, profile: ServerProfile | None = None) -> StreamOptions:
    """The stream that a request asks for. Raises what the server's ``aggregate`` would raise (that of ``profile``'s
    version, where it is known), and UsageError for what has no meaning here."""
    return StreamOptions.parse(
        request.scope, request.stage(), request.stages(), collation=request.collation_document(), profile=profile
    )


def collections_read(plan: Plan) -> Iterator[tuple[str, str]]:
    """What a stream reads in addition to the oplog, as far as that is known before its first event: where the images
    are kept, and the collection whose current documents are looked up."""
    options = plan.options
    if plan.reads_logged_images or plan.exact_images:
        pass
    elif options.full_document in ("whenAvailable", "required") or options.full_document_before_change != "off":
        yield "config", "system.preimages"
    scope = options.scope
    if options.full_document == "updateLookup" and scope.database is not None and scope.collection is not None:
        yield scope.database, scope.collection
