"""One loaderd, two devices, an inferd on each: read once, all or nothing, back from a restart, all freed."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import structlog.testing

from shared.errors import WarmupFailed
from shared.memory.backend import Slab
from tests.unit.device_host import (
    ALL_OTHER,
    CONTENT_BYTES,
    MODEL,
    SLAB_BYTES,
    TENSOR_BYTES,
    VERSION_BYTES,
    VERSION_SLABS,
    A,
    B,
    DeviceHost,
    device_host,
    write_version,
)
from tests.unit.memory.fake_backend import FakeWritableSlab

Scenario = Callable[[DeviceHost], Awaitable[None]]


@pytest.fixture(autouse=True)
def _plain_logs() -> Iterator[None]:
    with structlog.testing.capture_logs():
        yield


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs a scenario on a host with two devices, v1 and an entirely different v2."""
    with tempfile.TemporaryDirectory(prefix="co-") as folder:

        def run(scenario: Scenario, **options: object) -> None:
            async def main() -> None:
                async with device_host(Path(folder), monkeypatch, **options) as host:  # type: ignore[arg-type]
                    write_version(host.folder / "models", "v1")
                    write_version(host.folder / "models", "v2", ALL_OTHER)
                    await scenario(host)

            asyncio.run(main())

        yield run


async def _both(host: DeviceHost) -> None:
    await host.attach("a", A)
    await host.attach("b", B)


def _has_all_copies(host: DeviceHost) -> bool:
    """Whether what is active and what is retained have a copy on both devices."""
    deployment = host.loaderd.deployments[MODEL]
    versions = (deployment.active, deployment.retained)
    return all(version is not None and set(version.copies) == {A, B} for version in versions)


def test_each_byte_is_read_once_and_both_devices_serve_it(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await _both(host)
        report = await host.push("v1")
        assert (report.state, report.error) == ("done", None)
        tag = await host.until_serving("v1")
        assert host.serving() == {"a": tag, "b": tag}
        assert host.backend.read_bytes == CONTENT_BYTES
        assert host.backend.calls["replicate"] == VERSION_SLABS
        assert (report.bytes_read, report.bytes_replicated) == (CONTENT_BYTES, VERSION_BYTES)
        assert host.used() == {A: VERSION_BYTES, B: VERSION_BYTES}
        status = await host.status()
        assert [(m.device, m.used_bytes, m.peak_bytes) for m in status.memory] == [
            (A, VERSION_BYTES, VERSION_BYTES),
            (B, VERSION_BYTES, VERSION_BYTES),
        ]
        (version,) = status.versions
        assert (version.devices, version.nbytes) == ((A, B), VERSION_BYTES)
        assert {(holder.inferd, holder.device) for holder in version.holders} == {("a", A), ("b", B)}
        assert {(inferd.name, inferd.device) for inferd in status.inferds} == {("a", A), ("b", B)}

    run(scenario)


def test_a_device_that_cannot_prepare_leaves_both_on_the_old_version(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await _both(host)
        await host.push("v1")
        tag = await host.until_serving("v1")
        host.replicas["b"].engine.fail_next("warm", WarmupFailed("NaN in layer 3"))
        report = await host.push("v2")
        assert report.state == "failed"
        assert report.error is not None
        assert "inferd b: NaN in layer 3" in report.error.message
        assert host.serving() == {"a": tag, "b": tag}
        assert (await host.status()).models[0].epoch == 1
        await host.signal.until(lambda: host.used() == {A: VERSION_BYTES, B: VERSION_BYTES})

    run(scenario)


def test_the_way_back_reads_and_copies_nothing(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await _both(host)
        await host.push("v1")
        await host.push("v2")
        await host.until_serving("v2")
        before = dict(host.backend.calls)
        report = await host.rollback()
        assert (report.state, report.inferds_committed) == ("done", 2)
        await host.until_serving("v1")
        assert dict(host.backend.calls) == before
        assert host.used() == {A: 2 * VERSION_BYTES, B: 2 * VERSION_BYTES}

    run(scenario)


def test_what_is_resident_is_shared_on_each_device(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        write_version(host.folder / "models", "v3", {4: 50})
        await _both(host)
        await host.push("v1")
        reply = await host.ask("v3", dry_run=True)
        assert (reply.plan.bytes_to_read, reply.plan.bytes_to_share) == (TENSOR_BYTES, 4 * TENSOR_BYTES)
        assert [(d.device, d.bytes_to_allocate) for d in reply.plan.devices] == [
            (A, SLAB_BYTES),
            (B, SLAB_BYTES),
        ]
        report = await host.push("v3")
        assert (report.state, report.bytes_read, report.bytes_replicated) == (
            "done",
            TENSOR_BYTES,
            SLAB_BYTES,
        )
        assert host.used() == {A: VERSION_BYTES + SLAB_BYTES, B: VERSION_BYTES + SLAB_BYTES}

    run(scenario)


def test_too_little_memory_on_one_device_is_refused_before_anything_changes(
    run: Callable[..., None],
) -> None:
    async def scenario(host: DeviceHost) -> None:
        await _both(host)
        await host.push("v1")
        others = host.memory.take(B, host.memory.free_bytes(B) - SLAB_BYTES)
        reads = host.backend.calls["read"]
        reply = await host.ask("v2")
        assert (reply.operation, reply.plan.verdict) == (None, "cold")
        missing = VERSION_BYTES - SLAB_BYTES
        assert reply.plan.reasons[0].startswith(f"{missing} bytes are missing on GPU-b to hold toy-v2")
        assert host.backend.calls["read"] == reads
        assert host.used()[A] == VERSION_BYTES
        host.memory.give_back(others.slab_id)

    run(scenario)


def test_memory_that_goes_after_the_plan_fails_the_push_before_a_byte_is_read(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(host: DeviceHost) -> None:
        await _both(host)
        await host.push("v1")
        tag = await host.until_serving("v1")
        read = host.backend.read_bytes
        free = host.memory.free_bytes
        with monkeypatch.context() as patch:
            patch.setattr(host.backend, "free_bytes", lambda device: free(device) + VERSION_BYTES)
            others = host.memory.take(B, free(B) - SLAB_BYTES)
            report = await host.push("v2")
        assert report.state == "failed"
        assert report.error is not None
        assert "a fake slab on GPU-b needs" in report.error.message
        assert host.backend.read_bytes == read
        assert host.serving() == {"a": tag, "b": tag}
        assert host.used()[A] == VERSION_BYTES
        host.memory.give_back(others.slab_id)

    run(scenario)


def test_a_copy_that_was_damaged_on_its_way_is_not_offered(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = FakeWritableSlab.copy_from

    def damaging(self: FakeWritableSlab, slab: Slab) -> None:
        copy(self, slab)
        self._data[17] ^= 1

    async def scenario(host: DeviceHost) -> None:
        await _both(host)
        await host.push("v1")
        tag = await host.until_serving("v1")
        with monkeypatch.context() as patch:
            patch.setattr(FakeWritableSlab, "copy_from", damaging)
            report = await host.push("v2")
        assert report.state == "failed"
        assert report.error is not None
        assert "on GPU-b" in report.error.message
        assert "damaged on the way" in report.error.message
        assert host.serving() == {"a": tag, "b": tag}
        assert host.used() == {A: VERSION_BYTES, B: VERSION_BYTES}

    run(scenario)


def test_after_a_restart_each_device_gets_its_copy_back_from_its_own_inferd(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await _both(host)
        await host.push("v1")
        await host.push("v2")
        tag = await host.until_serving("v2")
        await host.restart()
        await host.signal.until(lambda: _has_all_copies(host))
        assert host.serving() == {"a": tag, "b": tag}
        assert (host.backend.read_bytes, host.backend.calls["replicate"]) == (0, 0)
        assert host.used() == {A: 2 * VERSION_BYTES, B: 2 * VERSION_BYTES}
        report = await host.rollback()
        assert (report.state, report.inferds_committed) == ("done", 2)
        await host.until_serving("v1")
        assert (await host.push("v2")).state == "done"

    run(scenario, grace_s=20.0)


def test_after_a_restart_a_device_without_inferd_gets_its_copy_from_the_other(
    run: Callable[..., None],
) -> None:
    async def scenario(host: DeviceHost) -> None:
        await _both(host)
        await host.push("v1")
        await host.push("v2")
        await host.until_serving("v2")
        await host.stop()
        await host.end("b")
        assert host.used() == {A: 2 * VERSION_BYTES, B: 0}
        await host.start()
        await host.signal.until(lambda: _has_all_copies(host))
        assert (host.backend.read_bytes, host.backend.calls["replicate"]) == (0, 2 * VERSION_SLABS)
        assert host.used() == {A: 2 * VERSION_BYTES, B: 2 * VERSION_BYTES}
        await host.attach("b", B)
        tag = await host.until_serving("v2")
        assert host.serving() == {"a": tag, "b": tag}
        assert (await host.rollback()).inferds_committed == 2

    run(scenario)
