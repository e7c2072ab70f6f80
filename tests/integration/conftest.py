"""Programs and processes that whole runs start are forked from one whose imports are done."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def imports_are_done(quick_python: None) -> None:
    """``quick_python``, for every test here."""
