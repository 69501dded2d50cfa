"""One server per test file that asks for it, over an engine that answers at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .serving import V1, V2, CountedAdmission, Served, fake_engine, serve


@pytest.fixture(scope="module")
def served_once() -> Iterator[Served]:
    with serve(fake_engine(V1, V2), CountedAdmission(V1, V2)) as served:
        yield served


@pytest.fixture
def served(served_once: Served) -> Iterator[Served]:
    """The module's server; every ticket is back when a test ends."""
    yield served_once
    assert served_once.admission.wait_none_out()
    assert served_once.engine.load().running == 0
