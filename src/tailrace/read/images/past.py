"""An image state whose past can be read, and rewritten without some documents."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

from tailrace.base import durable
from tailrace.read.images.state import ImageState, layout_in, next_folder, write_layout


class PastImages(ImageState):
    """The state, opened to take out documents that are gone."""

    def past(self) -> Iterator[bytes]:
        """The keys of the documents that are kept to undo batches, each as often as it is."""
        self.flush()
        for bucket in self._buckets:
            yield from bucket.past()

    def forget(self, goes: Callable[[bytes], bool]) -> None:
        """Write all files anew: without what was deleted, and without the documents that are kept to undo batches under
        keys that ``goes`` selects. Batches can be undone as before; these documents are then not there. Closes the
        state; a crash leaves the old files or the new ones."""
        self.flush()
        folder = next_folder(self._folder)
        for number, bucket in enumerate(self._buckets):
            bucket.write_anew(folder / f"{number:04d}", goes)
        durable.sync_directory(folder)
        durable.step("images.rewritten")
        write_layout(self.directory, layout_in(self.directory, self.buckets) | {"folder": folder.name})
        durable.step("images.replaced")
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)
