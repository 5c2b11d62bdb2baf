"""A sync with an archive that publishes often, as a process to be killed.

``python -m tests.sync.archived_process SOURCE TARGET FOLDER DOCUMENTS_PER_SECOND``
"""

from __future__ import annotations

import sys

from tailrace.act.sync import archiving
from tailrace.sync import Sync


def main(arguments: list[str]) -> None:
    source, target, folder, limit = arguments
    archiving._PUBLISHED_S = 0.3  # type: ignore[misc]
    with Sync(source, target, archive=folder, documents_per_second=float(limit), lease_s=2) as sync:
        sync.run()


if __name__ == "__main__":
    main(sys.argv[1:])
