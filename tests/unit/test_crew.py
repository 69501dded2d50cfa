"""The threads of a load: which error they end with, and what stays of it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from loaderd.crew import Crew
from shared.errors import ReadFailed, Superseded


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_the_first_cause_is_told_and_not_what_followed_from_it() -> None:
    first, second = ReadFailed("pread", 5, "first", 0), ReadFailed("pread", 5, "second", 0)
    errors = iter([Superseded("the load was ended"), first, second])

    def work() -> None:
        raise next(errors)

    with pytest.raises(ReadFailed) as caught, Crew(threading.Event()) as crew:  # noqa: PT012
        for _ in range(3):
            crew.wait(crew.start(1, work))
        crew.check()

    assert caught.value is first


@pytest.mark.usefixtures("_uncollected")
def test_what_failed_is_let_go_of_with_its_error() -> None:
    class Slab:
        pass

    def failing() -> weakref.ref[Slab]:
        slab = Slab()

        def work() -> None:
            raise ReadFailed("pread", 5, f"into {slab}", 0)

        with Crew(threading.Event()) as crew:
            crew.wait(crew.start(1, work))
            kept = weakref.ref(slab)
            try:
                crew.check()
            except ReadFailed:
                return kept
        raise AssertionError

    assert failing()() is None
