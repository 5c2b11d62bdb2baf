"""``python -m tailrace`` is the command ``tailrace``."""

from tailrace.cli.main import main

raise SystemExit(main())
