"""Several devices after loaderd was restarted: each copy is taken back, or made from another device's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.device_host import (
    MODEL,
    SLAB_BYTES,
    VERSION_BYTES,
    VERSION_SLABS,
    A,
    B,
    DeviceHost,
    attach_both,
    write_version,
)

pytestmark = pytest.mark.usefixtures("plain_logs")


def _has_all_copies(host: DeviceHost) -> bool:
    """Whether what is active and what is retained have a copy on both devices."""
    deployment = host.loaderd.deployments[MODEL]
    versions = (deployment.active, deployment.retained)
    return all(version is not None and set(version.copies) == {A, B} for version in versions)


def test_after_a_restart_each_device_gets_its_copy_back_from_its_own_inferd(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await attach_both(host)
        await host.push("v1")
        await host.push("v2")
        tag = await host.until_serving("v2")
        await host.restart()
        await host.signal.until(lambda: _has_all_copies(host))
        assert host.serving() == {"a": tag, "b": tag}
        assert (host.backend.read_bytes, host.backend.calls["copy"]) == (0, 0)
        assert host.used() == {A: 2 * VERSION_BYTES, B: 2 * VERSION_BYTES}
        assert {version.verified for version in (await host.status()).versions} == {"sealed"}
        report = await host.rollback()
        assert (report.state, report.inferds_committed) == ("done", 2)
        await host.until_serving("v1")
        assert (await host.push("v2")).state == "done"

    run(scenario, grace_s=20.0)


def test_after_a_restart_a_device_without_inferd_gets_its_copy_from_the_other(
    run: Callable[..., None],
) -> None:
    async def scenario(host: DeviceHost) -> None:
        await attach_both(host)
        await host.push("v1")
        await host.push("v2")
        await host.until_serving("v2")
        await host.stop()
        await host.end("b")
        assert host.used() == {A: 2 * VERSION_BYTES, B: 0}
        await host.start()
        await host.signal.until(lambda: _has_all_copies(host))
        assert (host.backend.read_bytes, host.backend.calls["copy"]) == (0, 2 * VERSION_SLABS)
        assert host.used() == {A: 2 * VERSION_BYTES, B: 2 * VERSION_BYTES}
        await host.attach("b", B)
        tag = await host.until_serving("v2")
        assert host.serving() == {"a": tag, "b": tag}
        assert (await host.rollback()).inferds_committed == 2

    run(scenario)


def test_a_copy_that_comes_back_damaged_is_made_again_from_another_device(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await attach_both(host)
        await host.push("v1")
        await host.until_serving("v1")
        await host.detach("b")
        await host.restart()
        await host.signal.until(lambda: set(host.copies()) == {A})
        with host.flipped_byte(B):
            host.attach_again("b")
            await host.signal.until(lambda: set(host.copies()) == {A, B})
            assert "inferd.not_adopted" in host.kinds()
        assert (host.backend.read_bytes, host.backend.calls["copy"]) == (0, VERSION_SLABS)
        # The inferd still maps the old slabs; they go with it.
        assert host.used() == {A: VERSION_BYTES, B: 2 * VERSION_BYTES}
        await host.end("b")
        assert host.used() == {A: VERSION_BYTES, B: VERSION_BYTES}
        await host.attach("b", B)
        tag = await host.until_serving("v1")
        assert host.serving() == {"a": tag, "b": tag}

    run(scenario, grace_s=20.0)


def test_shared_slabs_stay_shared_where_a_copy_is_made_again(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        write_version(host.folder / "models", "v3", {4: 50})
        await attach_both(host)
        await host.push("v1")
        await host.push("v3")
        await host.until_serving("v3")
        used = host.used()
        await host.stop()
        await host.end("b")
        await host.start()
        await host.signal.until(lambda: _has_all_copies(host))
        assert host.used() == used == {A: VERSION_BYTES + SLAB_BYTES, B: VERSION_BYTES + SLAB_BYTES}
        assert host.backend.calls["copy"] == VERSION_SLABS + 1

    run(scenario)


def test_a_copy_for_which_there_is_no_room_is_told_and_the_other_device_serves_on(
    run: Callable[..., None],
) -> None:
    async def scenario(host: DeviceHost) -> None:
        await attach_both(host)
        await host.push("v1")
        await host.until_serving("v1")
        await host.stop()
        await host.end("b")
        others = host.memory.take(B, host.memory.free_bytes(B) - SLAB_BYTES)
        await host.start()
        await host.signal.until(lambda: "version.not_replicated" in host.kinds())
        tag = await host.until_serving("v1")
        assert set(host.copies()) == {A}
        await host.attach("b", B)
        await host.signal.until(lambda: "inferd.not_reconciled" in host.kinds())
        assert host.serving() == {"a": tag, "b": None}
        refused = (await host.ask("v2")).plan
        assert refused.verdict == "refuse"
        assert refused.reasons[0].startswith(f"toy-v2 needs {VERSION_BYTES} bytes on GPU-b")
        host.memory.give_back(others.slab_id)
        # The next push brings both devices together again, and what it retains is completed when needed.
        assert (await host.push("v2")).state == "done"
        await host.until_serving("v2")
        assert (await host.rollback()).inferds_committed == 2
        await host.until_serving("v1")
        assert set(host.copies()) == {A, B}

    run(scenario)


def test_memory_of_another_device_than_an_inferd_claims_is_not_taken_back(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        liar = await host.attach("a", A)
        await host.push("v1")
        await host.until_serving("v1")
        await host.stop()
        liar.link._identity = replace(liar.link._identity, device=B)
        await host.start()
        await host.signal.until(lambda: "inferd.not_reconciled" in host.kinds())
        (entry,) = (each for each in host.history() if each.kind == "inferd.not_reconciled")
        assert entry.cause == "a is on GPU-b and handed back a slab of GPU-a"
        assert not host.copies()

    run(scenario, grace_s=20.0)
