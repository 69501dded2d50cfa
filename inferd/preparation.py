"""Prepare and release: from received fds to a warm slot, and back to an empty one."""

from __future__ import annotations

import asyncio
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from inferd.engine.protocol import Engine
from inferd.slot_states import SlotEvent, SlotState
from inferd.slot_thread import SlotThread
from inferd.slots import Slot, Slots
from shared.errors import ChangeoverError, InvalidRequest, ProtocolError, WarmupFailed
from shared.gate import Gate
from shared.ids import VersionTag
from shared.memory.backend import MemoryBackend
from shared.resident import ResidentVersion, check_identity
from shared.transfer import IncomingVersion

log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrepareTimes:
    """Seconds that each part of a preparation took; all zero if the version was already there."""

    map_s: float = 0.0
    verify_s: float = 0.0
    build_s: float = 0.0
    warm_s: float = 0.0


class Preparer:
    """Fills and empties slots, one at a time, while the engine goes on serving.

    A preparation is never cancelled half-way: its work runs on a thread that cannot be interrupted
    safely, so a caller that gave up gets a slot that is prepared or empty, never in between.
    """

    def __init__(
        self, slots: Slots, engine: Engine, backend: MemoryBackend, gate: Gate, *, verify_mapped: bool
    ) -> None:
        """`gate` is asked before bytes are hashed; what lets them through is not this object's concern."""
        self._slots = slots
        self._engine = engine
        self._backend = backend
        self._gate = gate
        self._verify_mapped = verify_mapped
        self._one_at_a_time = asyncio.Lock()
        self._thread = SlotThread()
        self._built: set[int] = set()  # slots that the engine holds; the slot thread's
        self._is_closing = False

    async def prepare(
        self, incoming: IncomingVersion, timeout_s: float, is_wanted: Callable[[], bool] = lambda: True
    ) -> PrepareTimes:
        """Map, check, build and warm; consumes the transfer, on every path.

        Drains the slot that does not serve if none is empty.  Raises SlotBusy if that takes longer
        than `timeout_s`, PeerGone if it is not wanted any more when the slot is free (the slot then
        keeps what it holds), and whatever mapping, the engine's build or its warming raise; the slot
        is empty then and what serves is untouched.
        """
        with incoming:
            async with self._one_at_a_time:
                self._check_open()
                slot = self._slots.holding(incoming.tag)
                if slot is not None:
                    self._check_usable(slot)
                    return PrepareTimes()
                slot = await self._free_slot(incoming.tag, timeout_s, is_wanted)
                return await self._fill(slot, incoming)

    async def release(self, tag: VersionTag, timeout_s: float) -> None:
        """Drain and unmap a version that does not serve; does nothing if it is not here.

        Raises InvalidRequest if it serves, SlotBusy if it does not drain in time.
        """
        async with self._one_at_a_time:
            self._check_open()
            slot = self._slots.releasable(tag)
            if slot is None:
                return
            if slot.life.state is SlotState.SERVING:
                raise InvalidRequest(f"{tag} serves; it cannot be released")
            await self._empty(slot, timeout_s, "released by loaderd")

    async def close(self) -> None:
        """Refuse further work and wait for the end of what is under way.

        Before whoever asked for it is cancelled: a thread that maps or builds cannot be, and must not
        find its slot taken away.
        """
        self._is_closing = True
        async with self._one_at_a_time:
            pass

    async def shut_down(self) -> None:
        """Unmap everything; no request is left and `close` has returned."""
        async with self._one_at_a_time:
            for slot in self._slots:
                if slot.life.state is not SlotState.EMPTY:
                    self._slots.retract()
                    await self._empty(slot, 0.0, "shutdown")
            self._thread.close()

    def _check_open(self) -> None:
        if self._is_closing:
            raise InvalidRequest("this inferd is shutting down")

    def _check_usable(self, slot: Slot) -> None:
        if slot.life.state not in (SlotState.PREPARED, SlotState.RETAINED, SlotState.SERVING):
            raise InvalidRequest(f"slot {slot.index} holds {slot.tag} and is {slot.life.state}")

    async def _free_slot(self, tag: VersionTag, timeout_s: float, is_wanted: Callable[[], bool]) -> Slot:
        empty = self._slots.empty()
        if empty is not None:
            return empty
        slot = self._slots.replaceable()
        if slot is None:
            raise ProtocolError("both slots are in use")  # one serves, the other is never left between
        await self._empty(slot, timeout_s, f"{tag} needs the slot", is_wanted)
        return slot

    async def _empty(
        self, slot: Slot, timeout_s: float, cause: str, is_wanted: Callable[[], bool] = lambda: True
    ) -> None:
        tag = slot.tag
        await self._slots.drain(slot, timeout_s, cause, is_wanted)
        await self._unload(slot, cause)
        log.info("slot.emptied", slot=slot.index, tag=str(tag), cause=cause)

    async def _unload(self, slot: Slot, cause: str) -> None:
        """Retire what the engine has of a drained or failed slot, unmap its version and mark it empty.  Both
        wait for the GPU, and so not on the loop's thread."""
        await self._thread.run(partial(self._retire, slot.index))
        version = self._slots.take_version(slot)
        if version is not None:
            await self._thread.run(version.close)
        self._slots.vacate(slot, None if version is None else version.tag, cause)

    async def _fill(self, slot: Slot, incoming: IncomingVersion) -> PrepareTimes:
        self._slots.advance(slot, SlotEvent.MAP, str(incoming.tag))
        try:
            started = time.perf_counter()
            version = await self._thread.run(partial(incoming.map, self._backend))
            self._slots.fill(slot, version)
            mapped = time.perf_counter()
            await self._thread.run(
                partial(check_identity, version, hash_bytes=self._verify_mapped, pacer=self._gate)
            )
            verified = time.perf_counter()
            self._slots.advance(slot, SlotEvent.MAPPED, "mapped and checked")
            await self._engine_work(lambda: self._build(slot.index, version))
            built = time.perf_counter()
            report = await self._engine_work(lambda: self._engine.warm(slot.index))
            warmed = time.perf_counter()
        except BaseException as error:
            _forget_frames(error)
            self._slots.advance(slot, SlotEvent.FAIL, f"{type(error).__name__}: {error}")
            await self._unload(slot, "preparation failed")
            raise
        self._slots.mark_prepared(slot)
        log.info("slot.prepared", slot=slot.index, tag=str(version.tag), prompts=report.prompts)
        return PrepareTimes(mapped - started, verified - mapped, built - verified, warmed - built)

    async def _engine_work(self, work: Callable[[], T]) -> T:
        """Run model code on a thread.  It is not ours: whatever it raises is this version's failure and
        must not end the daemon that serves another one."""
        try:
            return await self._thread.run(work)
        except ChangeoverError:
            raise
        except Exception as error:
            log.exception("engine.failed")
            raise WarmupFailed(f"{type(error).__name__}: {error}") from error

    def _build(self, index: int, version: ResidentVersion) -> None:
        tensors = {
            entry.name: version.slabs[entry.slab].tensor(entry.offset_bytes, entry.dtype, entry.shape)
            for entry in version.layout.tensors
        }
        # The engine reads config and tokenizer from files; they are the bytes that were verified,
        # and nothing reads them after the build.
        with tempfile.TemporaryDirectory(prefix="changeover-assets-") as folder:
            for name, data in version.assets.items():
                (Path(folder) / name).write_bytes(data)
            self._engine.build(index, version.tag, tensors, Path(folder))
        self._built.add(index)

    def _retire(self, index: int) -> None:
        if index in self._built:
            self._engine.retire(index)
            self._built.discard(index)


def _forget_frames(error: BaseException) -> None:
    """Clear the locals of the frames an error went through, and of its causes: they hold tensors, and
    would keep the failed version's memory for as long as someone keeps the error."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        pending += [each.__cause__, each.__context__]
