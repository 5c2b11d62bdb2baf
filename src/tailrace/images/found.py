"""What the ways of taking a batch into the state share: the images that they give, and the error of a wrong state."""

from __future__ import annotations

from tailrace.images.delta import ImageMismatchError
from tailrace.plan.request import PreImageKey

#: The documents before operations.
Images = dict[PreImageKey, bytes]


def wrong_state(error: ImageMismatchError, position: str) -> ImageMismatchError:
    """The error for an entry that does not fit the state."""
    return ImageMismatchError(
        f"the images are not those of the server: {error.message}, at {position}",
        hint="Seed them again in a new directory",
    )
