"""An inferd that serves nothing: it speaks the handoff's language and reports the latencies it is told to."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from shared.codec import HANDOFF_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.control import SlotReport
from shared.fdpass import SeqpacketChannel
from shared.handoff import (
    FROM_LOADERD,
    Commit,
    Committed,
    FromInferd,
    Hello,
    Pace,
    Prepare,
    Prepared,
    Release,
    Released,
    Report,
)
from shared.messages import Tag

Latency = Callable[["ScriptedInferd"], float]
"""Seconds between tokens at this moment; 0: nobody asks for any."""


class ScriptedInferd:
    """Attached during the `with`, from a thread of its own.  Everything that it is asked for succeeds."""

    def __init__(self, handoff: Path, model: str, latency: Latency) -> None:
        self._handoff = handoff
        self._model = model
        self._latency = latency
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._stop: Callable[[], object] = lambda: None
        self._is_attached = threading.Event()
        self._slots: dict[int, SlotReport] = {}
        self._epoch = 0
        self._counters = [0, 0]  # steps, and the ns they took
        self.paces: list[Pace] = []
        """All that loaderd said of pace."""

    @property
    def is_watched(self) -> bool:
        """Whether loaderd wants frequent reports, as it does while it copies or hashes."""
        return bool(self.paces) and self.paces[-1].report_every_s < 1

    @property
    def may_hash(self) -> bool:
        """Whether copies and digests go on just now; without limit counts as going on."""
        return not self.paces or self.paces[-1].bytes_per_s != 0

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._is_attached.wait(20):
            raise AssertionError("the scripted inferd was not welcome")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._thread.join()

    async def _main(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard = asyncio.Event()
        channel = await SeqpacketChannel.connect(str(self._handoff))
        try:
            hello = Hello(
                protocol=PROTOCOL_VERSION,
                name="scripted",
                model=self._model,
                backend="host",
                device="host",
                engine="none",
                flip="pointer",
                serves_two_versions=True,
                epoch=0,
            )
            await channel.send(encode(hello, HANDOFF_FRAME_BYTES))
            _, fds = await channel.receive()
            fds.close()
            talking = [loop.create_task(self._obey(channel)), loop.create_task(self._report(channel))]
            self._stop = lambda: loop.call_soon_threadsafe(lambda: [task.cancel() for task in talking])
            self._is_attached.set()
            await asyncio.wait(talking)
            for task in talking:
                if not task.cancelled():
                    task.result()
        finally:
            channel.close()

    async def _obey(self, channel: SeqpacketChannel) -> None:
        while True:
            frame, fds = await channel.receive()
            fds.close()
            message = decode(frame, FROM_LOADERD, HANDOFF_FRAME_BYTES)
            match message:
                case Pace():
                    self.paces.append(message)
                    self._heard.set()
                case Prepare(request_id=number, tag=tag):
                    slot = next(n for n in (0, 1) if self._state(n) != "serving")
                    self._slots[slot] = SlotReport(slot=slot, state="prepared", tag=tag)
                    times = {"map_s": 0.0, "verify_s": 0.0, "build_s": 0.0, "warm_s": 0.0}
                    await self._send(channel, Prepared(request_id=number, tag=tag, **times))
                case Commit(request_id=number, tag=tag, epoch=epoch):
                    self._epoch = epoch
                    self._flip(tag)
                    done = Committed(request_id=number, tag=tag, epoch=epoch, flip_ns=1)
                    await self._send(channel, done)
                case Release(request_id=number, tag=tag):
                    self._slots = {n: slot for n, slot in self._slots.items() if slot.tag != tag}
                    await self._send(channel, Released(request_id=number, tag=tag))
                case _:
                    pass

    def _state(self, slot: int) -> str:
        return self._slots[slot].state if slot in self._slots else "empty"

    def _flip(self, tag: Tag) -> None:
        for number, slot in self._slots.items():
            state = "serving" if slot.tag == tag else "retained"
            self._slots[number] = slot.model_copy(update={"state": state})

    async def _report(self, channel: SeqpacketChannel) -> None:
        began = time.monotonic()
        while True:
            self._heard.clear()
            latency = self._latency(self)
            await self._send(channel, None)
            every_s = self.paces[-1].report_every_s if self.paces else 1.0
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._heard.wait()
            now = time.monotonic()
            if latency:
                steps = int((now - began) / latency)
                self._counters[0] += steps
                self._counters[1] += round(steps * latency * 1e9)
            began = now

    async def _send(self, channel: SeqpacketChannel, answer: FromInferd | None) -> None:
        steps, spent_ns = self._counters
        report = Report(
            epoch=self._epoch,
            slots=tuple(self._slots.values()),
            running=int(self._latency(self) > 0),
            waiting=0,
            tokens_generated=steps,
            decode_steps=steps,
            decode_ns=spent_ns,
        )
        await channel.send(encode(report, HANDOFF_FRAME_BYTES))
        if answer is not None:
            await channel.send(encode(answer, HANDOFF_FRAME_BYTES))
