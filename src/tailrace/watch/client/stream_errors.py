"""The errors that end a stream, as a program meets them."""

from __future__ import annotations

from typing import Final

from bson.errors import BSONError

from tailrace.core.cursor.reply import IN_AGGREGATE, IN_GET_MORE
from tailrace.core.plan.profile import ServerProfile
from tailrace.errors import OtherVersionError, SourceError, TailraceError, UsageError
from tailrace.read.source.driver_error import as_driver_error

#: What a decoder of events may raise.
CANNOT_DECODE: Final = (BSONError, ValueError, OverflowError, TypeError)


def named_version(error: OtherVersionError) -> SourceError:
    """The error of a stream whose user named the version: resuming would come to the same entry again."""
    return SourceError(error.message, hint=error.hint)


def undecodable(error: Exception) -> Exception:
    """The error that ends a stream of which an event cannot be decoded."""
    refused = UsageError(
        f"an event cannot be decoded: {error}",
        hint="Watch with document_class=RawBSONDocument, or with codec options that allow the value",
    )
    return as_driver_error(refused, type(error))


def in_execution(error: TailraceError, profile: ServerProfile, *, is_opening: bool) -> TailraceError:
    """The error of a stage in the server's words: where it was met comes before the message, from 5.0 on. Of a shard's
    stage the shard comes before that: it is the shard's own command that fails."""
    prefix = IN_AGGREGATE if is_opening else IN_GET_MORE
    if profile.series < (5, 0) or prefix in error.message:
        return error
    of_shard = error.__cause__
    said = of_shard.message if isinstance(of_shard, TailraceError) else error.message
    head = error.message.removesuffix(said)
    error.message = f"{head}{prefix}{said}" if head != error.message else f"{prefix}{error.message}"
    error.args = (error.message,)
    return error
