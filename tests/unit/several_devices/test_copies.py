"""One loaderd, two devices, an inferd on each: read once, all or nothing, all freed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from loaderd.seal.create import seal_directory
from shared.control import Verify
from shared.errors import WarmupFailed
from shared.memory.backend import Slab
from tests.unit.device_host import (
    ALL_OTHER,
    CONTENT_BYTES,
    MODEL,
    OTHER_MODEL,
    SLAB_BYTES,
    TENSOR_BYTES,
    VERSION_BYTES,
    VERSION_SLABS,
    A,
    B,
    DeviceHost,
    attach_both,
    write_version,
)
from tests.unit.memory.fake_backend import FakeWritableSlab

pytestmark = pytest.mark.usefixtures("plain_logs")


def test_each_byte_is_read_once_and_both_devices_serve_it(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await attach_both(host)
        report = await host.push("v1")
        assert (report.state, report.error) == ("done", None)
        tag = await host.until_serving("v1")
        assert host.serving() == {"a": tag, "b": tag}
        assert host.backend.read_bytes == CONTENT_BYTES
        assert host.backend.calls["copy"] == VERSION_SLABS
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
        await attach_both(host)
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
        await attach_both(host)
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
        await attach_both(host)
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
        await attach_both(host)
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
        await attach_both(host)
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
        await attach_both(host)
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


def test_an_inferd_that_comes_later_finds_the_copy_on_its_device(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.push("v1")
        calls = dict(host.backend.calls)
        await attach_both(host)
        tag = await host.until_serving("v1")
        assert host.serving() == {"a": tag, "b": tag}
        assert dict(host.backend.calls) == calls

    run(scenario)


def test_an_inferd_on_another_device_is_told_where_its_model_is(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("b", B, is_awaited=False)
        await host.signal.until(lambda: "lease.refused" in host.kinds())
        (entry,) = (each for each in host.history() if each.kind == "lease.refused")
        assert entry.cause == "inferd is on device GPU-b, versions of toy are on GPU-a"

    run(scenario, devices=(A,))


def test_content_of_another_device_is_copied_and_not_read(run: Callable[..., None]) -> None:
    """A second model of the same bytes, on the other device alone."""

    async def scenario(host: DeviceHost) -> None:
        write_version(host.folder / "models", "v1", model=OTHER_MODEL)
        await host.push("v1")
        assert host.used() == {A: VERSION_BYTES, B: 0}
        read = host.backend.read_bytes
        report = await host.push("v1", model=OTHER_MODEL)
        assert (report.state, report.bytes_read, report.bytes_replicated) == ("done", 0, VERSION_BYTES)
        assert host.backend.read_bytes == read
        assert host.used() == {A: VERSION_BYTES, B: VERSION_BYTES}
        status = await host.status()
        assert {(v.tag.model, v.devices) for v in status.versions} == {(MODEL, (A,)), (OTHER_MODEL, (B,))}

    run(scenario, devices=(A,), other_devices=(B,))


def test_verify_hashes_every_copy_and_names_the_device(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.push("v1")
        sound = await host.loaderd.inquiries.verify(Verify(name="v1"))
        assert (sound.devices, sound.nbytes, sound.damaged) == ((A, B), 2 * CONTENT_BYTES, ())
        with host.flipped_byte(B):
            found = await host.loaderd.inquiries.verify(Verify(name="v1"))
        assert (found.damaged, found.damaged_devices) == (("t0",), (B,))
        (entry,) = (each for each in host.history() if each.kind == "version.damaged")
        assert entry.data["device"] == B

    run(scenario)


def test_a_newer_push_ends_a_load_to_both_devices(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await attach_both(host)
        reached, go = threading.Event(), threading.Event()

        def hold(_: object) -> None:
            reached.set()
            go.wait(30)

        host.backend.before_read = hold
        first = await host.ask("v1")
        assert first.operation is not None
        await asyncio.to_thread(reached.wait, 30)
        host.backend.before_read = None
        second = await host.ask("v2")
        go.set()
        assert second.operation is not None
        assert (await host.ended(first.operation)).state == "superseded"
        assert (await host.ended(second.operation)).state == "done"
        tag = await host.until_serving("v2")
        assert host.serving() == {"a": tag, "b": tag}
        assert host.used() == {A: VERSION_BYTES, B: VERSION_BYTES}

    run(scenario)


def test_a_rollback_that_is_refused_leaves_the_way_back(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        folder = write_version(host.folder / "models", "v3", ALL_OTHER)
        (folder / "tokenizer.json").write_text("{}")
        seal_directory(folder)
        await attach_both(host)
        await host.push("v1")
        await host.push("v3")
        report = await host.rollback("switch")
        assert report.state == "refused"
        assert report.error is not None
        assert "needs one tokenizer" in report.error.message
        assert (await host.rollback()).state == "done"
        await host.until_serving("v1")

    run(scenario)


def test_metrics_are_per_device(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        registry = CollectorRegistry()
        host.loaderd.export_metrics(registry)
        await host.push("v1")
        for device in (A, B):
            assert registry.get_sample_value("changeover_weight_bytes", {"device": device}) == VERSION_BYTES
            assert registry.get_sample_value("changeover_device_total_bytes", {"device": device}) == 64 << 20

    run(scenario)
