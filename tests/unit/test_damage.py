"""Resident bytes that change after they were verified: found, told to everyone, kept from use, and healed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from loaderd.damage import Damage
from loaderd.versions import Version
from shared.control import Rollback, Verify
from shared.errors import DigestMismatch, InvalidRequest, Superseded
from shared.ids import DeviceId, SlabId
from shared.layout import Layout
from tests.unit.device_host import (
    ALL_OTHER,
    MODEL,
    TENSOR_BYTES,
    VERSION_BYTES,
    A,
    B,
    DeviceHost,
    device_host,
    write_version,
)

pytestmark = pytest.mark.usefixtures("plain_logs")

Scenario = Callable[[DeviceHost], Awaitable[None]]


@pytest.fixture
def run(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scenario on a host with v1, an entirely different v2, and v3, which has all but t4 from v1."""

    def run(scenario: Scenario, there: tuple[DeviceId, ...] = (A,)) -> None:
        async def main() -> None:
            async with device_host(short_path, monkeypatch, there=there) as host:
                root = host.folder / "models"
                write_version(root, "v1")
                write_version(root, "v2", ALL_OTHER)
                write_version(root, "v3", {4: 99})
                await scenario(host)

        asyncio.run(main())

    return run


def active(host: DeviceHost) -> Version:
    version = host.loaderd.deployments[MODEL].active
    assert version is not None
    return version


def damage(host: DeviceHost, version: Version, tensor: str, device: DeviceId = A) -> SlabId:
    """Flip a bit in the middle of a tensor where it is resident; the slab's id."""
    layout = version.copies[device].layout
    entry = next(each for each in layout.tensors if each.name == tensor)
    slab_id = layout.slabs[entry.slab].slab_id
    host.memory.damage(slab_id, entry.offset_bytes + entry.nbytes // 2)
    return slab_id


async def verify(host: DeviceHost, name: str) -> tuple[str, ...]:
    return (await host.loaderd.inquiries.verify(Verify(name=name))).damaged


async def eventually(look: Callable[[], bool]) -> None:
    """Wait for a counter or a report, which wake nobody."""
    async with asyncio.timeout(20):
        while not look():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.01)


async def until_told(host: DeviceHost, name: str = "a") -> None:
    """Wait until an inferd knows, and loaderd knows that it does."""
    slots = host.replicas[name].slots
    await host.signal.until(lambda: any(slot.damaged for slot in slots))
    lease = next(x for x in host.loaderd.handoff.leases.values() if x.name == name)
    await eventually(lambda: any(slot.is_damaged for slot in lease.slots))


async def damaged_v1(host: DeviceHost) -> SlabId:
    """v1 serves on inferd a, and t2 of it is damaged and known to be."""
    await host.attach("a", A)
    assert (await host.push("v1")).state == "done"
    slab_id = damage(host, active(host), "t2")
    assert await verify(host, "toy-v1") == ("t2",)
    await until_told(host)
    return slab_id


def test_what_verify_finds_everyone_is_told(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await damaged_v1(host)
        verdict = host.loaderd.ready()
        assert not verdict.is_ok
        assert verdict.reason == f"active {active(host).tag} is damaged: tensor t2"
        verdict = host.replicas["a"].slots.verdict()
        assert not verdict.is_ok
        assert verdict.reason == f"{active(host).tag} is damaged: tensor t2"
        status = await host.status()
        assert [v.damaged for v in status.versions] == [("t2",)]
        assert [s.is_damaged for s in status.inferds[0].slots if s.tag] == [True]
        assert host.serving() == {"a": active(host).tag}, "it serves on"
        (entry,) = [e for e in host.loaderd._host.chronicle.journal.newest(None, 99) if "damaged" in e.kind]
        assert entry.data["tensor"] == "t2"
        assert entry.data["file"] == "model.safetensors"
        assert (entry.data["device"], entry.data["found_by"]) == (A, "verify")
        assert await verify(host, "toy-v1") == ("t2",)
        entries = host.loaderd._host.chronicle.journal.newest(None, 99)
        assert [e.kind for e in entries].count("version.damaged") == 1, "nothing new was found"

    run(scenario)


def test_a_scrub_finds_it_within_a_round(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("a", A)
        await host.push("v1")
        scrub = host.loaderd.scrub
        scrubbing = asyncio.create_task(scrub.run(0.02, 1e12))
        await eventually(lambda: scrub.rounds >= 2)
        assert "version.damaged" not in host.kinds()
        damage(host, active(host), "t3")
        rounds = scrub.rounds
        # The round under way may have passed the place already.
        await eventually(lambda: scrub.rounds >= rounds + 2)
        scrubbing.cancel()
        assert not host.loaderd.ready().is_ok
        (entry,) = [e for e in host.loaderd._host.chronicle.journal.newest(None, 99) if "damaged" in e.kind]
        assert (entry.data["tensor"], entry.data["found_by"]) == ("t3", "scrub")
        await until_told(host)

    run(scenario)


def test_a_push_of_the_same_content_heals(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        slab_id = await damaged_v1(host)
        before = active(host).tag
        report = await host.push("v1")
        assert report.state == "done", report
        assert report.bytes_read > 2 * TENSOR_BYTES - 1, "nothing of the damaged slab is shared"
        assert active(host).tag == before
        assert host.loaderd.ready().is_ok
        assert host.replicas["a"].slots.verdict().is_ok
        assert host.serving() == {"a": before}
        assert await verify(host, "toy-v1") == ()
        assert slab_id not in host.memory.sealed, "the damaged slab is freed"
        assert host.loaderd.deployments[MODEL].retained is None

    run(scenario)


def test_another_version_heals_and_what_is_damaged_is_no_way_back(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await damaged_v1(host)
        assert (await host.push("v2")).state == "done"
        assert host.loaderd.ready().is_ok
        assert host.replicas["a"].slots.verdict().is_ok
        with pytest.raises(InvalidRequest, match="nothing to roll back to"):
            await host.loaderd.rollback(Rollback())
        assert host.used() == {A: VERSION_BYTES}

    run(scenario)


def test_a_damaged_way_back_is_refused_and_renewed(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("a", A)
        await host.push("v1")
        await host.push("v2")
        retained = host.loaderd.deployments[MODEL].retained
        assert retained is not None
        damage(host, retained, "t0")
        assert await verify(host, "toy-v1") == ("t0",)
        await until_told(host)
        verdict = host.loaderd.ready()
        assert verdict.reason == f"retained {retained.tag} is damaged: tensor t0"
        assert host.replicas["a"].slots.verdict().is_ok, "what serves there is whole"
        with pytest.raises(DigestMismatch, match=r"t0.*is damaged where it is resident"):
            await host.loaderd.rollback(Rollback())
        with pytest.raises(DigestMismatch):
            await host.loaderd.rollback(Rollback(to="v1"))
        assert (await host.push("v1")).state == "done"
        assert host.loaderd.ready().is_ok
        assert active(host).ref.version == "v1"
        assert await verify(host, "toy-v1") == ()
        assert (await host.rollback()).state == "done"
        assert active(host).ref.version == "v2"

    run(scenario)


def test_nothing_is_shared_from_a_damaged_slab(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("a", A)
        await host.push("v1")
        whole = (await host.ask("v3", dry_run=True)).plan
        damage(host, active(host), "t2")
        await verify(host, "toy-v1")
        plan = (await host.ask("v3", dry_run=True)).plan
        assert plan.bytes_to_share < whole.bytes_to_share
        assert (await host.push("v3")).state == "done"
        assert await verify(host, "toy-v3") == ()
        assert host.loaderd.ready().is_ok

    run(scenario)


def test_who_shares_a_slab_shares_its_damage(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("a", A)
        await host.push("v1")
        assert (await host.push("v3")).bytes_read == TENSOR_BYTES
        damage(host, active(host), "t2")
        assert await verify(host, "toy-v3") == ("t2",)
        damaged = {v.tag.version: v.damaged for v in (await host.status()).versions}
        assert damaged == {"v1": ("t2",), "v3": ("t2",)}
        await host.signal.until(lambda: all(slot.damaged for slot in host.replicas["a"].slots))

    run(scenario)


def test_a_restart_heals_from_the_folder(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("a", A)
        await host.push("v1")
        before = active(host)
        damage(host, before, "t1")
        await host.restart()
        slots = host.replicas["a"].slots
        await host.signal.until(lambda: any(slot.damaged for slot in slots))
        assert slots.serving() == before.tag, "it serves on meanwhile"
        assert not slots.verdict().is_ok
        maintaining = asyncio.create_task(host.loaderd.maintain())
        await host.until_serving("v1")
        await host.signal.until(lambda: slots.verdict().is_ok)
        await eventually(lambda: host.used() == {A: VERSION_BYTES})
        maintaining.cancel()
        assert active(host).tag == before.tag
        assert await verify(host, "toy-v1") == ()

    run(scenario)


def test_one_device_of_two(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("a", A)
        await host.attach("b", B)
        await host.push("v1")
        damage(host, active(host), "t2", B)
        report = await host.loaderd.inquiries.verify(Verify(name="toy-v1"))
        assert (report.damaged, report.damaged_devices) == (("t2",), (B,))
        await until_told(host, "b")
        assert host.replicas["a"].slots.verdict().is_ok
        assert not host.replicas["b"].slots.verdict().is_ok
        assert not host.loaderd.ready().is_ok
        assert (await host.push("v1")).state == "done"
        assert host.replicas["b"].slots.verdict().is_ok
        assert host.loaderd.ready().is_ok

    run(scenario, there=(A, B))


def test_nobody_is_offered_what_is_damaged(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await damaged_v1(host)
        await host.attach("late", A)
        await host.signal.until(lambda: "inferd.not_reconciled" in host.kinds())
        assert host.serving()["late"] is None
        assert host.replicas["late"].backend.calls["import"] == 0, "not even mapped"

    run(scenario)


def test_no_slab_no_damage() -> None:
    damage = Damage()
    assert not damage.note(Layout((), ()), ("w",))
    assert damage.names(Layout((), ())) == ()
    assert list(damage.places()) == []


# --- checks give way -----------------------------------------------------------------------------


def test_a_check_gives_way_to_the_push_that_needs_the_memory(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("a", A)
        await host.attach("b", B)
        await host.push("v1")
        v1 = active(host)
        await host.push("v2")
        # One copy is hashed at once, the other's turn does not come.
        check = asyncio.ensure_future(host.loaderd.scrub.check(v1, "scrub", most_bytes_per_s=1.0))
        await eventually(lambda: host.loaderd.pace.admitted_bytes > 0)
        report = await host.push("v3")
        assert report.state == "done"
        with pytest.raises(Superseded, match="toy-v1 was released while it was hashed"):
            await check
        here = [v.copies[A] for v in host.loaderd._host.versions if A in v.copies]
        slabs = {slab.entry.slab_id: slab.entry.nbytes for copy in here for slab in copy.slabs}
        assert v1 not in tuple(host.loaderd._host.versions)
        assert host.loaderd.slabs.used_bytes(A) == sum(slabs.values())

    run(scenario, (A, B))


def test_no_check_outlives_the_daemon(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.attach("a", A)
        await host.attach("b", B)
        await host.push("v1")
        check = asyncio.ensure_future(host.loaderd.scrub.check(active(host), "scrub", most_bytes_per_s=1.0))
        await eventually(lambda: host.loaderd.pace.admitted_bytes > 0)
        check.cancel()
        async with asyncio.timeout(20):
            await host.loaderd.end_work()
        with pytest.raises(Superseded):
            await host.loaderd.scrub.check(active(host), "verify", most_bytes_per_s=1.0)

    run(scenario, (A, B))
