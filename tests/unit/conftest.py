"""What several unit tests need."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog.testing

from tests.support.signing import KeyPair, make_keys


@pytest.fixture
def plain_logs() -> Iterator[None]:
    """structlog's default for terminals renders the locals of every frame, and so keeps them alive."""
    with structlog.testing.capture_logs():
        yield


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    """To be read only: a test that changes a key's file makes one of its own."""
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder whose sockets' paths fit their address: it has 108 bytes, and `tmp_path` is long."""
    with tempfile.TemporaryDirectory(prefix="co-") as folder:
        yield Path(folder)
