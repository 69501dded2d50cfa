"""Versions and slabs: who counts, what is freed and when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from loaderd.chronicle import Chronicle
from loaderd.journal import Journal
from loaderd.lifecycle import VersionEvent, VersionState
from loaderd.slab_table import SlabTable, UserId
from loaderd.versions import Version, VersionTable
from shared.errors import InvariantError
from shared.ids import HOST_DEVICE, DeviceId, Generation, VersionRef, VersionTag
from shared.memory.backend import Slab
from tests.support.resident import make_resident
from tests.unit.memory.fake_backend import FakeBackend

E = VersionEvent
TO_ACTIVE = (E.PLAN, E.LOAD, E.VERIFY, E.PREPARE, E.PREPARED, E.COMMIT)


class HoldingLease:
    """The part of a lease that `collect` asks."""

    def __init__(self, *tags: VersionTag) -> None:
        self.tags = set(tags)

    def holds(self, tag: VersionTag) -> bool:
        return tag in self.tags


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[VersionTable]:
    context = zmq.Context()
    publisher = context.socket(zmq.PUB)
    with Journal(tmp_path / "journal.jsonl") as journal:
        yield VersionTable(Chronicle(journal, Generation("g"), publisher), SlabTable(_close))
    publisher.close(0)
    context.term()


def _close(slabs: Sequence[Slab]) -> None:
    for slab in slabs:
        slab.close()


def _resident(table: VersionTable, backend: FakeBackend, version: str) -> Version:
    memory = make_resident(backend, version, {"w": version.encode() * 1000})
    found = table.new(memory.tag.ref)
    found.add_copy(HOST_DEVICE, memory)
    for slab in memory.slabs:
        table.slabs.add(slab, found.user)
    return found


def _advance(table: VersionTable, version: Version, *events: VersionEvent) -> None:
    for event in events:
        table.advance(version, event, "test")


def test_memory_goes_when_nobody_maps_it(table: VersionTable, backend: FakeBackend) -> None:
    version = _resident(table, backend, "v1")
    _advance(table, version, *TO_ACTIVE, E.RETAIN, E.SWEEP)
    lease = HoldingLease(version.tag)
    table.collect([lease])  # type: ignore[list-item]
    assert version.state is VersionState.DRAINING
    assert table.slabs.used_bytes(HOST_DEVICE) > 0
    lease.tags.clear()
    table.collect([lease])  # type: ignore[list-item]
    assert version.state is VersionState.FREED
    assert table.slabs.used_bytes(HOST_DEVICE) == 0
    assert list(table) == []
    backend.check_no_leaks()


def test_what_serves_or_is_retained_is_never_collected(table: VersionTable, backend: FakeBackend) -> None:
    active, retained = _resident(table, backend, "v2"), _resident(table, backend, "v1")
    _advance(table, active, *TO_ACTIVE)
    _advance(table, retained, *TO_ACTIVE, E.RETAIN)
    table.collect([])
    assert active.is_resident
    assert retained.is_resident


def test_a_failed_version_is_freed_with_its_last_holder(table: VersionTable, backend: FakeBackend) -> None:
    version = _resident(table, backend, "v1")
    _advance(table, version, E.PLAN, E.LOAD, E.VERIFY, E.PREPARE, E.FAIL)
    lease = HoldingLease(version.tag)
    table.collect([lease])  # type: ignore[list-item]
    assert table.slabs.used_bytes(HOST_DEVICE) > 0
    table.collect([])
    assert table.slabs.used_bytes(HOST_DEVICE) == 0
    assert list(table) == []
    backend.check_no_leaks()


def test_a_second_load_of_the_same_content_does_not_wait_for_the_first_ones_holders(
    table: VersionTable, backend: FakeBackend
) -> None:
    first, second = _resident(table, backend, "v1"), _resident(table, backend, "v1")
    _advance(table, first, *TO_ACTIVE)
    _advance(table, second, E.PLAN, E.LOAD, E.VERIFY, E.SWEEP)
    table.collect([HoldingLease(first.tag)])  # type: ignore[list-item]
    assert second.state is VersionState.FREED
    assert first.is_resident
    assert table.find(first.tag) is first


def test_shared_slabs_go_with_their_last_user(table: VersionTable, backend: FakeBackend) -> None:
    first = _resident(table, backend, "v1")
    slab_id = first.content.layout.slabs[0].slab_id
    user = table.hold(first)
    assert table.slabs.shared_bytes([slab_id]) == table.slabs.used_bytes(HOST_DEVICE)
    assert table.slabs.release(first.user) == 0
    assert slab_id in table.slabs
    assert table.slabs.release(user) > 0
    backend.check_no_leaks()


def test_the_peak_is_remembered(table: VersionTable, backend: FakeBackend) -> None:
    first = _resident(table, backend, "v1")
    second = _resident(table, backend, "v2")
    peak = table.slabs.used_bytes(HOST_DEVICE)
    table.slabs.release(first.user)
    table.slabs.release(second.user)
    assert (table.slabs.used_bytes(HOST_DEVICE), table.slabs.peak_bytes(HOST_DEVICE)) == (0, peak)


def test_slabs_are_counted_once_and_never_guessed(backend: FakeBackend) -> None:
    slabs = SlabTable(_close)
    memory = make_resident(backend, "v1", {"w": b"x"})
    slabs.add(memory.slabs[0], UserId(1))
    with pytest.raises(InvariantError, match="added twice"):
        slabs.add(memory.slabs[0], UserId(2))
    other = make_resident(backend, "v2", {"w": b"y"})
    with pytest.raises(InvariantError, match="is not resident"):
        slabs.share(other.layout.slabs[0].slab_id, UserId(1))
    other.slabs[0].close()
    slabs.close()
    backend.check_no_leaks()


def test_each_step_is_in_the_history(table: VersionTable, backend: FakeBackend, tmp_path: Path) -> None:
    version = _resident(table, backend, "v1")
    _advance(table, version, *TO_ACTIVE)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(lines) == len(TO_ACTIVE)
    assert '"to":"active"' in lines[-1]
    assert version.tag.digest in lines[-1]
    table.slabs.close()


def test_a_copy_must_be_like_the_others_and_on_a_device_of_its_own(
    table: VersionTable, backend: FakeBackend
) -> None:
    version = _resident(table, backend, "v1")
    other = make_resident(backend, "v1", {"w": b"another"})
    with pytest.raises(InvariantError, match="two copies on host"):
        version.add_copy(HOST_DEVICE, version.content)
    with pytest.raises(InvariantError, match="two copies on GPU-a"):
        version.add_copy(DeviceId("GPU-a"), version.content)
    moved = replace(
        other, layout=replace(other.layout, slabs=(replace(other.layout.slabs[0], device=DeviceId("GPU-a")),))
    )
    with pytest.raises(InvariantError, match="the copy of toy-v1 on GPU-a is another version"):
        version.add_copy(DeviceId("GPU-a"), moved)
    assert set(version.copies) == {HOST_DEVICE}
    other.slabs[0].close()
    table.slabs.close()


def test_a_version_that_is_not_resident_has_no_content(table: VersionTable) -> None:
    version = table.new(VersionRef("toy", "v1"))
    assert not version.is_resident
    with pytest.raises(InvariantError, match="toy-v1 is not resident"):
        version.content  # noqa: B018
