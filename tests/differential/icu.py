"""A mark for tests that need ICU, which is an extra."""

from __future__ import annotations

import importlib.util

import pytest

WITHOUT_ICU = "ICU for Python (the extra icu) is not installed"

needs_icu = pytest.mark.skipif(importlib.util.find_spec("icu") is None, reason=WITHOUT_ICU)
