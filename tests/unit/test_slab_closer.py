"""Memory that is given back beside everything else: who waits for it, and who does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loaderd.loading import Loaded, load_and_verify
from loaderd.slab_closer import SlabCloser
from loaderd.version_load import VersionLoad
from shared.errors import ChangeoverError, DriverError, InvariantError
from shared.ids import DeviceId, OperationId
from tests.support.resident import make_resident
from tests.unit.device_host import (
    MODEL,
    SEEDS,
    VERSION_BYTES,
    VERSION_SLABS,
    A,
    B,
    DeviceHost,
    device_host,
    write_version,
)
from tests.unit.memory.fake_backend import FakeBackend, FakeSlab, FakeWritableSlab

pytestmark = pytest.mark.usefixtures("plain_logs")

WITHIN_S = 10.0


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """loaderd's slabs are closed once it is set, where they are closed on a thread of their own."""
    event = threading.Event()
    close = FakeSlab.close

    def held(slab: FakeSlab) -> None:
        if threading.current_thread().name.startswith("close-slabs"):
            assert event.wait(WITHIN_S)
        close(slab)

    monkeypatch.setattr(FakeSlab, "close", held)
    yield event
    event.set()


def _no_failure(error: ChangeoverError) -> None:
    raise error


def test_it_is_closed_in_its_own_time(let_go: threading.Event) -> None:
    async def main() -> None:
        closer.add(slabs)
        waiting = [asyncio.create_task(closer.settle()) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        assert len(backend.live) == len(slabs)
        let_go.set()
        await asyncio.gather(*waiting)
        assert not backend.live
        await closer.settle()

    backend = FakeBackend()
    slabs = make_resident(backend, "v1", {"w": b"x" * 1000}).slabs
    with SlabCloser(_no_failure) as closer:
        asyncio.run(main())


def test_what_cannot_be_closed_is_told_once_and_to_nobody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        closer.add(slabs[:2])
        await closer.settle()
        assert told == [refused]
        closer.add(slabs[2:])
        await closer.settle()

    backend, told = FakeBackend(), list[ChangeoverError]()
    slabs = [make_resident(backend, version, {"w": b"x"}).slabs[0] for version in ("v1", "v2", "v3")]
    refused = DriverError("cuMemUnmap", 700, "an illegal address was met")
    close = FakeSlab.close

    def refusing(slab: FakeSlab) -> None:
        close(slab)
        if slab is slabs[0]:
            raise refused

    monkeypatch.setattr(FakeSlab, "close", refusing)
    with SlabCloser(told.append) as closer:
        asyncio.run(main())
    assert told == [refused]
    assert not backend.live, "those after it are closed, too"


def test_a_broken_invariant_ends_what_ends() -> None:
    told: list[ChangeoverError] = []
    slabs = make_resident(FakeBackend(), "v1", {"w": b"x"}).slabs
    slabs[0].close()
    closer = SlabCloser(told.append)
    closer.add(slabs)
    asyncio.run(closer.settle())
    with pytest.raises(InvariantError, match="closed twice"):
        closer.close()
    assert len(told) == 1


def test_what_comes_next_is_closed_whatever_came_of_what_was_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(slab: FakeSlab) -> None:
        close(slab)
        if slab is before:
            raise RuntimeError("nobody knows this")

    backend, close = FakeBackend(), FakeSlab.close
    before, after = (make_resident(backend, version, {"w": b"x"}).slabs[0] for version in ("v1", "v2"))
    monkeypatch.setattr(FakeSlab, "close", refuse)
    closer = SlabCloser(_no_failure)
    closer.add([before])
    closer._under_way[0].exception(WITHIN_S)
    with pytest.raises(RuntimeError, match="nobody knows"):
        closer.add([after])
    closer.close()
    assert not backend.live


def test_it_needs_no_thread_when_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    backend = FakeBackend()
    slabs = make_resident(backend, "v1", {"w": b"x"}).slabs
    with SlabCloser(_no_failure) as closer:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        closer.add(slabs)
    assert not backend.live


def test_who_waits_no_longer_leaves_the_others_waiting(let_go: threading.Event) -> None:
    async def main() -> None:
        closer.add(slabs)
        leaving, staying = (asyncio.create_task(closer.settle()) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        assert not staying.done()
        let_go.set()
        await staying
        assert not backend.live

    backend = FakeBackend()
    slabs = make_resident(backend, "v1", {"w": b"x"}).slabs
    with SlabCloser(_no_failure) as closer:
        asyncio.run(main())


@pytest.fixture
def run(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scenario on a host with room for so many of four versions that share nothing."""

    def run(versions: int, scenario: Callable[[DeviceHost], Awaitable[None]]) -> None:
        async def main() -> None:
            capacity_bytes = versions * VERSION_BYTES
            async with device_host(
                short_path, monkeypatch, there=(A,), capacity_bytes=capacity_bytes
            ) as host:
                for turn in range(4):
                    seeds = {index: 10 * turn + seed for index, seed in enumerate(SEEDS)}
                    write_version(host.folder / "models", f"v{turn + 1}", seeds)
                await scenario(host)

        asyncio.run(main())

    return run


def test_a_push_does_not_wait_for_what_it_lets_go_of(
    run: Callable[..., None], let_go: threading.Event
) -> None:
    async def scenario(host: DeviceHost) -> None:
        for version in ("v1", "v2", "v3"):
            operation = host.loaderd._host.operations.get((await host.ask(version)).operation or "")
            await host.signal.until(lambda: not operation.is_running)  # noqa: B023  awaited here
            assert operation.state == "done"
        assert host.loaderd.slabs.used_bytes(A) == 2 * VERSION_BYTES
        assert host.used() == {A: 3 * VERSION_BYTES}, "v1 is not closed yet"
        planning, status = (asyncio.create_task(work) for work in (host.ask("v4"), host.status()))
        await asyncio.sleep(0.05)
        assert not planning.done()
        assert not status.done()
        let_go.set()
        reply = await planning
        assert not reply.plan.sweep_first, "the plan counts on v1's memory"
        assert (await status).memory[0].free_bytes >= VERSION_BYTES
        assert (await host.ended(reply.operation or "")).state == "done"

    run(3, scenario)


def test_what_is_swept_to_make_room_is_waited_for(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.push("v1")
        await host.push("v2")
        creating = threading.Event()
        close, create = FakeSlab.close, host.backend.create_slab

        def slow(slab: FakeSlab) -> None:
            early.append(creating.wait(0.1))
            close(slab)

        def noted(device: DeviceId, nbytes: int) -> FakeWritableSlab:
            creating.set()
            return create(device, nbytes)

        early: list[bool] = []
        monkeypatch.setattr(FakeSlab, "close", slow)
        monkeypatch.setattr(host.backend, "create_slab", noted)
        assert (await host.push("v3")).state == "done"
        assert early[:VERSION_SLABS] == [False] * VERSION_SLABS

    run(2, scenario)


def test_a_status_does_not_wait_for_ever(
    run: Callable[..., None], let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(host: DeviceHost) -> None:
        monkeypatch.setattr("loaderd.inquiries.SETTLE_WITHIN_S", 0.05)
        for version in ("v1", "v2", "v3"):
            operation = host.loaderd._host.operations.get((await host.ask(version)).operation or "")
            await host.signal.until(lambda: not operation.is_running)  # noqa: B023  awaited here
        async with asyncio.timeout(WITHIN_S):
            assert (await host.status()).memory[0].free_bytes == 0
        let_go.set()

    run(3, scenario)


def test_what_cannot_be_closed_fails_no_push_and_is_in_the_history(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(host: DeviceHost) -> None:
        for version in ("v1", "v2", "v3", "v4"):
            assert (await host.push(version)).state == "done"
        assert (await host.status()).memory[0].free_bytes == VERSION_BYTES
        (told,) = (entry for entry in host.history() if entry.kind == "memory.not_freed")
        assert "cuMemUnmap" in told.cause

    close, refused = FakeSlab.close, []

    def refusing(slab: FakeSlab) -> None:
        close(slab)
        if not refused:
            refused.append(slab)
            raise DriverError("cuMemUnmap", 700, "an illegal address was met")

    monkeypatch.setattr(FakeSlab, "close", refusing)
    run(3, scenario)


def test_what_is_let_go_of_before_a_load_is_planned_is_waited_for(
    run: Callable[..., None], let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client was answered before."""

    async def scenario(host: DeviceHost) -> None:
        async def proven(_: VersionLoad) -> None:
            host.loaderd.closer.add([_filled(host, A)])
            asyncio.get_running_loop().call_later(0.05, let_go.set)

        await host.push("v1")
        monkeypatch.setattr(VersionLoad, "prove", proven)
        assert (await host.push("v2")).state == "done"

    run(2, scenario)


def test_a_copy_to_another_device_waits(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, let_go: threading.Event
) -> None:
    async def main() -> None:
        async with device_host(short_path, monkeypatch, devices=(A,), capacity_bytes=VERSION_BYTES) as host:
            write_version(host.folder / "models", "v1")
            await host.push("v1")
            active = host.loaderd.deployments[MODEL].active
            assert active is not None
            host.loaderd.closer.add([_filled(host, B)])
            copying = asyncio.create_task(host.loaderd._host.copies.on(B, active))
            await asyncio.sleep(0.05)
            assert not copying.done()
            let_go.set()
            assert (await copying).tag == active.tag

    asyncio.run(main())


def test_what_is_superseded_as_it_is_loaded_is_given_back(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(host: DeviceHost) -> None:
        def load(*arguments: Any) -> Loaded:
            loaded = load_and_verify(*arguments)
            current = host.loaderd.deployments[MODEL]._current
            assert current is not None
            current.superseded_by = OperationId("another")
            return loaded

        monkeypatch.setattr("loaderd.version_load.load_and_verify", load)
        assert (await host.push("v1")).state == "superseded"
        assert host.used() == {A: 0}

    run(1, scenario)


def _filled(host: DeviceHost, device: DeviceId) -> FakeSlab:
    """A slab of loaderd's that a version could take the place of."""
    return host.backend.create_slab(device, VERSION_BYTES).seal()
