"""What the tests of the console share with those of the gateway."""

from __future__ import annotations

from tests.gateway.conftest import certificates

__all__ = ["certificates"]
