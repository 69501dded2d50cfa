"""What several unit tests need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog.testing


@pytest.fixture
def plain_logs() -> Iterator[None]:
    """structlog's default for terminals renders the locals of every frame, and so keeps them alive."""
    with structlog.testing.capture_logs():
        yield
