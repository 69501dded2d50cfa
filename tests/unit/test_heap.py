"""Which objects the garbage collector looks at once a daemon is set up."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry

from shared.heap import freeze_heap


class _Cycle:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_there_is_not_looked_at_again() -> None:
    kept = _Cycle()

    freeze_heap(CollectorRegistry())

    assert not any(each is kept for each in gc.get_objects())


def test_what_was_garbage_is_freed_first() -> None:
    garbage = weakref.ref(_Cycle())

    freeze_heap(CollectorRegistry())

    assert garbage() is None


def test_what_becomes_garbage_later_is_freed() -> None:
    freeze_heap(CollectorRegistry())
    garbage = weakref.ref(_Cycle())

    assert gc.isenabled()
    gc.collect()

    assert garbage() is None
