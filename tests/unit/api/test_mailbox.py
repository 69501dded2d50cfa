"""Outputs reach the loop in order, with one wake-up for as many as there are."""

from __future__ import annotations

import asyncio
import threading

from inferd.api.mailbox import Mailbox
from inferd.engine.protocol import SequenceOutput


def output(number: int) -> SequenceOutput:
    return SequenceOutput(1, str(number), (number,))


def test_what_came_while_the_reader_was_busy_is_taken_at_once() -> None:
    async def read() -> list[list[int]]:
        mailbox = Mailbox(asyncio.get_running_loop())
        takes = []
        for start in (0, 3):
            for number in range(start, start + 3):
                mailbox.post(output(number))
            takes.append([one.token_ids[0] for _, one in await mailbox.take()])
        return takes

    assert asyncio.run(read()) == [[0, 1, 2], [3, 4, 5]]


def test_nothing_is_lost_between_threads() -> None:
    async def read() -> list[int]:
        mailbox = Mailbox(asyncio.get_running_loop())

        def write() -> None:
            for number in range(5000):
                mailbox.post(output(number))

        thread = threading.Thread(target=write)
        thread.start()
        seen: list[int] = []
        async with asyncio.timeout(20):
            while len(seen) < 5000:
                seen += [one.token_ids[0] for _, one in await mailbox.take()]
        thread.join()
        return seen

    assert asyncio.run(read()) == list(range(5000))


def test_a_ring_wakes_a_reader_that_has_nothing_to_read() -> None:
    async def read() -> int:
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.ring()
        async with asyncio.timeout(20):
            return len(await mailbox.take())

    assert asyncio.run(read()) == 0


def test_a_closed_loop_is_no_error_for_the_writer() -> None:
    async def make() -> Mailbox:
        return Mailbox(asyncio.get_running_loop())

    asyncio.run(make()).post(output(1))
