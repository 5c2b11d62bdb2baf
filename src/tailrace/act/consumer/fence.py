"""Writes that a newer owner's writes shut out: every target carries the fencing token of its last writer.

``_fence: {orders: 7}`` says that an owner of the lease on ``orders``, version 7, wrote the document. A write with
version 6 finds nothing to change then. The field holds a version for each resource, so that several listeners may write
to one document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bson.int64 import Int64
from pymongo import ReturnDocument
from pymongo.client_session import ClientSession
from pymongo.collection import Collection
from pymongo.errors import DuplicateKeyError
from pymongo.results import DeleteResult, UpdateResult

from tailrace.act.consumer.rules.errors import Fenced
from tailrace.errors import InternalError, UsageError

__all__ = ["Fence", "Fenced"]

FENCE_FIELD: Final = "_fence"
_TRIES: Final = 5

Update = Mapping[str, Any] | Sequence[Mapping[str, Any]]


class Fence:
    """Writes to MongoDB under one fencing token. A handler has it as ``change.fence``.

    A write changes its target only if that carries no newer token of this resource, and stamps it. If nothing was
    changed because of a newer token, it raises Fenced; if nothing matches the filter, the result says so, as PyMongo's
    does.

    Args:
        resource: the resource whose lease has ``version``: the name of the token inside ``field``
        above: tokens under further names, which shut out older ones too: for a lane, that of the whole resource
        check: called before each write; raises LeaseLost where the lease is known to be lost
    """

    def __init__(
        self,
        resource: str,
        version: int,
        *,
        field: str = FENCE_FIELD,
        check: Callable[[], None] = lambda: None,
        session: ClientSession | None = None,
        above: Mapping[str, int] | None = None,
    ) -> None:
        if not field or field.startswith("$") or "." in field or "\0" in field:
            raise UsageError(f"a fence needs a top-level field of the target, not {field!r}")
        self.resource = resource
        self.version = version
        self.field = field
        self._check = check
        self._session = session
        self._above = dict(above or {})
        self._tokens = {escaped(name): Int64(number) for name, number in {resource: version, **self._above}.items()}

    def update_one(
        self, collection: Collection[Any], filter: Mapping[str, Any], update: Update, *, upsert: bool = False
    ) -> UpdateResult:
        """PyMongo's ``update_one``, fenced. An upsert needs a value for ``_id`` in its filter."""
        stamped = self._stamped(update)
        result: UpdateResult = self._written(
            collection,
            filter,
            upsert,
            lambda where, insert: collection.update_one(where, stamped, upsert=insert, session=self._session),
            lambda result: result.matched_count or result.upserted_id is not None,
        )
        return result

    def update_many(self, collection: Collection[Any], filter: Mapping[str, Any], update: Update) -> UpdateResult:
        """PyMongo's ``update_many``, fenced: targets without a newer token are changed; if there were also targets with
        one, Fenced is raised afterwards."""
        self._check()
        result = collection.update_many(self._where(filter), self._stamped(update), session=self._session)
        self._refuse_newer(collection, filter)
        return result

    def replace_one(
        self,
        collection: Collection[Any],
        filter: Mapping[str, Any],
        replacement: Mapping[str, Any],
        *,
        upsert: bool = False,
    ) -> UpdateResult:
        """PyMongo's ``replace_one``, fenced. Tokens of other resources in the target are kept."""
        if any(name.startswith("$") for name in replacement):
            raise UsageError("a replacement must not contain operators", hint="Use update_one")
        # A replacement by pipeline: only that keeps the other tokens of the document that it replaces.
        fence = {
            "$mergeObjects": [
                {"$cond": [{"$eq": [{"$type": f"${self.field}"}, "object"]}, f"${self.field}", {}]},
                {"$literal": self._tokens},
            ]
        }
        own = {name: value for name, value in replacement.items() if name != self.field}
        identity = {} if "_id" in own else {"_id": "$_id"}
        pipeline = [{"$replaceWith": {"$mergeObjects": [identity, {"$literal": own}, {self.field: fence}]}}]
        result: UpdateResult = self._written(
            collection,
            filter,
            upsert,
            lambda where, insert: collection.update_one(where, pipeline, upsert=insert, session=self._session),
            lambda result: result.matched_count or result.upserted_id is not None,
        )
        return result

    def insert_one(self, collection: Collection[Any], document: Mapping[str, Any]) -> UpdateResult:
        """Insert ``document``, which needs an ``_id``, or replace what is there unless its token is newer: a change
        that is handled twice inserts once."""
        if "_id" not in document:
            raise UsageError(
                "a fenced insert needs an _id: without one, a change that is handled twice would be inserted twice",
                hint="Take one from the change, such as its document key or its token",
            )
        return self.replace_one(collection, {"_id": document["_id"]}, document, upsert=True)

    def delete_one(self, collection: Collection[Any], filter: Mapping[str, Any]) -> DeleteResult:
        """PyMongo's ``delete_one``, fenced. A deleted document carries no token any more: an older owner's upsert can
        create it again, so mark documents as deleted where that matters."""
        result: DeleteResult = self._written(
            collection,
            filter,
            False,
            lambda where, _: collection.delete_one(where, session=self._session),
            lambda result: result.deleted_count,
        )
        return result

    def find_one_and_update(
        self,
        collection: Collection[Any],
        filter: Mapping[str, Any],
        update: Update,
        *,
        upsert: bool = False,
        return_document: bool = ReturnDocument.BEFORE,
        **options: Any,
    ) -> Any:
        """PyMongo's ``find_one_and_update``, fenced. ``options`` are PyMongo's (``projection``, ``sort``)."""
        stamped = self._stamped(update)
        if upsert and return_document == ReturnDocument.BEFORE:
            raise UsageError(
                "a fenced upsert returns the document as it is after the update", hint="return_document=AFTER"
            )
        return self._written(
            collection,
            filter,
            upsert,
            lambda where, insert: collection.find_one_and_update(
                where,
                stamped,
                upsert=insert,
                return_document=return_document,
                session=self._session,
                **options,
            ),
            lambda document: document is not None,
        )

    def bound_to(self, session: ClientSession) -> Fence:
        """The same fence, writing with ``session``."""
        return Fence(
            self.resource, self.version, field=self.field, check=self._check, session=session, above=self._above
        )

    def _where(self, filter: Mapping[str, Any]) -> dict[str, Any]:
        older = [{f"{self.field}.{name}": {"$not": {"$gt": token}}} for name, token in self._tokens.items()]
        return {"$and": [dict(filter), *older]}

    def _newer(self, filter: Mapping[str, Any]) -> dict[str, Any]:
        newer = [{f"{self.field}.{name}": {"$gt": token}} for name, token in self._tokens.items()]
        return {"$and": [dict(filter), {"$or": newer}]}

    def _stamped(self, update: Update) -> Any:
        """The update, which also leaves our token."""
        stamps = {f"{self.field}.{name}": token for name, token in self._tokens.items()}
        if isinstance(update, Mapping):
            if not update or any(not name.startswith("$") for name in update):
                raise UsageError("an update consists of operators such as $set", hint="Use replace_one to replace")
            return {**update, "$set": {**update.get("$set", {}), **stamps}}
        return [*update, {"$set": {path: {"$literal": token} for path, token in stamps.items()}}]

    def _written(
        self,
        collection: Collection[Any],
        filter: Mapping[str, Any],
        upsert: bool,
        write: Callable[[dict[str, Any], bool], Any],
        has_matched: Callable[[Any], Any],
    ) -> Any:
        if upsert:
            _check_identity(filter)
        for last in (*[False] * (_TRIES - 1), True):
            self._check()
            try:
                result = write(self._where(filter), upsert)
            except DuplicateKeyError:
                # The target is there: it carries a newer token, or somebody has just made it, or another unique index
                # holds a document against us.
                self._refuse_newer(collection, filter)
                if last or self._session is not None:
                    raise
                continue
            if not has_matched(result):
                self._refuse_newer(collection, filter)
            return result
        raise InternalError("a fenced write did not finish")

    def _refuse_newer(self, collection: Collection[Any], filter: Mapping[str, Any]) -> None:
        """Raises Fenced where a target with a newer token is there."""
        document = collection.find_one(self._newer(filter), {self.field: 1}, session=self._session)
        if document is None:
            return
        newer = document.get(self.field, {}).get(escaped(self.resource))
        raise Fenced(
            f"a write to {collection.full_name} with version {self.version} of the lease on {self.resource!r} changed "
            f"nothing: the target carries version {newer}",
        )


def escaped(resource: str) -> str:
    """A resource's name as the name of a field: without dots, and without a leading $."""
    text = resource.replace("%", "%25").replace(".", "%2E").replace("\0", "%00")
    return f"%24{text[1:]}" if text.startswith("$") else text


def _check_identity(filter: Mapping[str, Any]) -> None:
    value = filter.get("_id")
    if "_id" not in filter or (isinstance(value, Mapping) and any(str(name).startswith("$") for name in value)):
        raise UsageError(
            "a fenced upsert needs a value for _id in its filter",
            hint="Without it two owners could each insert a document, and a fence works only within one document",
        )
