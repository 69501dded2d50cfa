"""The threads of a load: which error they end with, and what stays of it."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType

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


def _is_waiting(thread: int) -> bool:
    """Whether a thread is in `Crew.wait`, and has called what blocks there."""
    frame: FrameType | None = sys._current_frames()[thread]
    is_blocked = frame is not None and frame.f_code.co_filename == threading.__file__
    while frame is not None and frame.f_code is not Crew.wait.__code__:
        frame = frame.f_back
    return is_blocked and frame is not None


def test_an_interrupted_wait_is_made_up_for() -> None:
    """Or slabs are closed while a thread still reads into them."""
    waiting = threading.main_thread().ident
    assert waiting is not None
    has_ended: list[bool] = []

    def work() -> None:
        while not _is_waiting(waiting):
            time.sleep(0.001)
        signal.pthread_kill(waiting, signal.SIGINT)
        while not crew.is_ending:
            time.sleep(0.001)
        time.sleep(0.1)
        has_ended.append(True)

    with pytest.raises(KeyboardInterrupt), Crew(threading.Event()) as crew:
        crew.wait(crew.start(1, work))

    assert has_ended
