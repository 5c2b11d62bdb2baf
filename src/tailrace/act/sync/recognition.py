"""Whether the target is still the one that the state of a sync was written to, with the collections that the state
names.

Position and documents are written in one transaction, so they can only disagree where somebody has replaced one of
them: a state document of another deployment, a database that was restored without the state, or the state without the
databases. A position that is later than the documents would leave changes out, and one whose collections do not exist
would make the server create new ones, without their options. Before anything is written, each collection must exist
under its name and UUID.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from bson.codec_options import CodecOptions
from bson.raw_bson import RawBSONDocument
from pymongo import MongoClient

from tailrace.act.sync.state import SyncDocument, SyncState
from tailrace.act.sync.target import answered
from tailrace.core.oplog.witness import DeploymentIdentity, Witness
from tailrace.core.printable import in_a_line
from tailrace.errors import SinkError
from tailrace.read.source.witness import identity_if_allowed

#: The field of the sync's document that says to which deployment it belongs.
DEPLOYMENT: Final = "deployment"
_RAW: Final[CodecOptions[RawBSONDocument]] = CodecOptions(
    document_class=RawBSONDocument, unicode_decode_error_handler="replace"
)
_HINT: Final = (
    "To start again, drop the collections on the target, remove the sync's state, and begin it again. `tailrace sync "
    "verify` compares both ends"
)


def deployment_of(state: SyncState) -> Mapping[str, Any]:
    """What is noted of the target when a sync begins. Raises SourceError where it cannot be asked."""
    return Witness(_identity(state)).to_document()


def recognise(state: SyncState, document: SyncDocument) -> None:
    """Raise SinkError where the target is not the one that ``document`` speaks of. While a definition is carried out,
    names and collections change, and only the deployment is compared."""
    _same_deployment(state, document)
    if document.barrier is not None:
        return
    there: dict[str, Mapping[str, bytes]] = {}
    for one in state.collections().values():
        database, _, name = one.target.partition(".")
        if database not in there:
            what = f"list the collections of {in_a_line(database)}"
            there[database] = answered(what, partial(_uuids, state.client, database))
        found = there[database].get(name)
        if found is None:
            raise SinkError(f"{in_a_line(one.target)} of the sync {state.name!r} is not on the target", hint=_HINT)
        if found != one.target_uuid:
            raise SinkError(
                f"{in_a_line(one.target)} on the target is not the collection that the sync {state.name!r} has made: "
                "somebody dropped it and created it again, or restored it",
                hint=_HINT,
            )


def _uuids(target: MongoClient[Any], database: str) -> dict[str, bytes]:
    """The collections of a database that are there, by name."""
    command = {"listCollections": 1, "filter": {"type": "collection"}}
    with target.get_database(database).cursor_command(command, codec_options=_RAW) as cursor:
        return {str(one["name"]): bytes(one["info"]["uuid"]) for one in cursor}


def _same_deployment(state: SyncState, document: SyncDocument) -> None:
    noted = document.extra.get(DEPLOYMENT)
    if noted is None:
        return  # taken out by hand, as the hint below allows
    try:
        before = Witness.from_document(noted).identity
    except ValueError:
        raise SinkError(f"the field {DEPLOYMENT} of the sync {state.name!r} is damaged", hint=_HINT) from None
    difference = before.difference(_identity(state))
    if difference is not None:
        raise SinkError(
            f"the state of the sync {state.name!r} was written to another deployment than this target: {difference}",
            hint=f"{_HINT}. If all files of the target were restored together, remove the field {DEPLOYMENT} from the "
            f"sync's document in {state.database}.syncs",
        )


def _identity(state: SyncState) -> DeploymentIdentity:
    """The target's. Where its user may not know the id, that is left out, and not compared."""
    if state.cluster is not None:
        return identity_if_allowed(state.cluster)
    hello = answered("say which deployment it is", lambda: state.client.admin.command("hello"))
    return identity_if_allowed(state.client) if "setName" in hello else DeploymentIdentity()
