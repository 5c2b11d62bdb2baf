"""What the plain and the compiled code of folding share: the type of their images, and the error for a wrong state."""

from __future__ import annotations

from tailrace.core.plan.request import PreImageKey
from tailrace.read.images.delta import ImageMismatchError

#: The documents before operations, by their PreImageKeys or by tuples that are equal to these.
Images = dict[PreImageKey | tuple[bytes, int, int], bytes]


def wrong_state(error: ImageMismatchError, position: str) -> ImageMismatchError:
    """The error for an entry that does not fit the state."""
    return ImageMismatchError(
        f"the image state does not match the server: {error.message}, at {position}",
        hint="Seed the images again in a new directory",
    )
