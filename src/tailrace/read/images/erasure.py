"""Remove deleted documents from what exact images keep of the past."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tailrace.base import durable
from tailrace.core.event.named_document import NamedDocuments, StoreErasure
from tailrace.errors import UsageError
from tailrace.read.images.key import state_key
from tailrace.read.images.past import PastImages
from tailrace.read.images.source import STREAM

_UUID_SIZE: Final = 16
_EARLIER: Final = (
    "a stream that is taken back to before the documents were gone has no images of them from then on, and takes them "
    "from the oplog again where that still holds them"
)


def erase_documents(
    root: Path, documents: NamedDocuments, *, uuid: bytes | None = None, dry_run: bool = False
) -> StoreErasure:
    """Erase the past images of ``documents`` from the directory ``root``. ``dry_run`` counts, and changes nothing.

    Args:
        uuid: of the documents' collection, 16 bytes; needed where the directory has the images of several collections

    Raises UsageError where there are no images, where the current image of one of the documents is there, and where the
    collection is not known; ImageStateError where a stream has the images open or they are damaged. Nothing has changed
    then."""
    folders = sorted(path.parent for path in root.rglob("layout.json"))
    if not folders:
        raise UsageError(f"{root} holds no exact images")
    report = StoreErasure("images", str(root))
    for folder in folders:
        _check_scope(folder, documents, uuid)
    goes = _selects(documents, uuid)
    with ExitStack() as stack:
        states = [stack.enter_context(PastImages.open(folder)) for folder in folders]
        for state in states:
            if any(goes(key) for key, _ in state.documents()):
                raise UsageError(
                    f"an image of a document to erase is current in {state.directory}",
                    hint="Delete the document at the source, let the stream follow, and repeat. Images of a collection "
                    "that was dropped disappear on their own when its batches can no longer be undone",
                )
            report.count("images of earlier states", sum(map(goes, state.past())))
        if not dry_run:
            for state in states:
                state.forget(goes)  # also what is not found: deleted documents stay in LMDB's files
            report.erased = report.total
    if report.total:
        report.kept.append(_EARLIER)
    return report


def _check_scope(folder: Path, documents: NamedDocuments, uuid: bytes | None) -> None:
    record = durable.read_sealed(folder / STREAM)
    if record is None:
        raise UsageError(f"{folder} does not say whose images it holds", hint="Restore its stream.json from a copy")
    if uuid is not None and len(documents.namespaces) > 1:
        raise UsageError("--uuid is the id of one collection", hint="Erase the documents of each collection separately")
    if uuid is None and documents.namespaces != (record["scope"],):
        raise UsageError(
            f"the images in {folder} are those of {record['scope']}, and know collections by UUID, not by name",
            hint="Name the documents of one collection, with --uuid: db.getCollectionInfos({name: ...})[0].info.uuid",
        )


def _selects(documents: NamedDocuments, uuid: bytes | None) -> Callable[[bytes], bool]:
    """Whether a key is that of one of the documents, in the collection ``uuid`` or in each one."""
    known: dict[bytes, set[bytes]] = {}

    def goes(key: bytes) -> bool:
        own = key[:_UUID_SIZE]
        if uuid is not None and own != uuid:
            return False
        if own not in known:
            known[own] = {state_key(own, one.id) for one in documents.documents}
        return key in known[own]

    return goes
