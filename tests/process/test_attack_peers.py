"""inferds that lie, die in mid-sentence or do not listen: loaderd and what others get are unharmed."""

from __future__ import annotations

import array
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

from shared.closing import Closing
from shared.codec import PROTOCOL_VERSION
from shared.handoff import SlabBatch
from shared.ids import VersionTag
from shared.memory.host import HostBackend
from shared.messages import Tag
from shared.resident import ResidentVersion
from shared.transfer import slab_batches, table_fds
from tests.support.procfs import memfds
from tests.support.resident import make_resident
from tests.support.serving_host import MODEL, ServingHost, serving_host


class Puppet(Closing):
    """An inferd of which every word is chosen by the test."""

    def __init__(self, host: ServingHost, model: str, **fields: object) -> None:
        """Attach; `fields` replace those of the hello."""
        self._socket = host.seqpacket()
        hello = {
            "kind": "hello",
            "protocol": PROTOCOL_VERSION,
            "name": "puppet",
            "model": model,
            "backend": "host",
            "device": "host",
            "engine": "none",
            "flip": "pointer",
            "serves_two_versions": True,
            "epoch": 0,
            "held": [],
        }
        self.say(hello | fields)

    def say(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self._socket.sendmsg([msgpack.packb(message)], ancillary)

    def answer(self, request: dict[str, Any], kind: str, **fields: object) -> None:
        self.say({"kind": kind, "request_id": request["request_id"], "tag": request["tag"], **fields})

    def prepared(self, request: dict[str, Any]) -> None:
        self.answer(request, "prepared", map_s=0.0, verify_s=0.0, build_s=0.0, warm_s=0.0)

    def report(self, *slots: dict[str, Any], epoch: int = 0) -> None:
        self.say(
            {
                "kind": "report",
                "epoch": epoch,
                "slots": list(slots),
                "running": 0,
                "waiting": 0,
                "tokens_generated": 0,
            }
        )

    def hear(self, kind: str) -> dict[str, Any]:
        """The next message, which must be of this kind; fds with it are closed."""
        message, fds = self.hear_with_fds(kind)
        for fd in fds:
            os.close(fd)
        return message

    def hear_with_fds(self, kind: str) -> tuple[dict[str, Any], list[int]]:
        """The next message, which must be of this kind, and its fds, which the caller closes.  What is said
        of pace may come at any time and is passed over."""
        while True:
            frame, fds, _, _ = socket.recv_fds(self._socket, 1 << 16, 128)
            assert frame, f"the connection ended where {kind} was due"
            message: dict[str, Any] = msgpack.unpackb(frame)
            if message["kind"] != "pace":
                assert message["kind"] == kind, message
                return message, fds

    def hear_end(self) -> None:
        """The connection must end here."""
        with suppress(ConnectionResetError):  # loaderd had not read everything
            while frame := self._socket.recv(1 << 16):
                assert msgpack.unpackb(frame)["kind"] == "pace", frame

    def hand_back(self, request: dict[str, Any], version: ResidentVersion) -> None:
        with table_fds(version) as fds:
            first = {
                "kind": "handed_back",
                "request_id": request["request_id"],
                "tag": wire(version.tag),
                "slabs": len(version.slabs),
            }
            self.say(first, fds)
        batch: SlabBatch
        for batch, borrowed in slab_batches(request["request_id"], version.slabs):
            self.say(batch.model_dump(), borrowed)

    def close(self) -> None:
        self._socket.close()


def wire(tag: VersionTag) -> dict[str, Any]:
    return Tag.of(tag).model_dump()


def serving(tag: VersionTag, epoch: int = 1, slot: int = 0) -> dict[str, Any]:
    """A held version as a hello has it."""
    return {"tag": wire(tag), "slot": slot, "state": "serving", "epoch": epoch}


@pytest.fixture(scope="module")
def host(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingHost]:
    """A loaderd without inferds; each test has a model of its own."""
    root = tmp_path_factory.mktemp("attacked")
    for model in (MODEL, "first", "lent", "twin"):
        shutil.copytree(models / "tiny-v1", root / f"{model}-v1")
    with serving_host(root) as host:
        host.start_loaderd()
        yield host
        assert host.loaderd.is_running


@pytest.fixture
def resident() -> Iterator[ResidentVersion]:
    version = make_resident(HostBackend(), "v9", {"w": b"x" * 5000})
    yield version
    for slab in version.slabs:
        slab.close()


def events_of(host: ServingHost, kind: str, model: str) -> list[str]:
    return [entry.cause for entry in host.history() if entry.kind == kind and entry.model == model]


def test_an_inferd_that_hands_back_and_dies_at_once_loses_nothing(
    host: ServingHost, resident: ResidentVersion
) -> None:
    """Its last frames and its end arrive together."""
    with Puppet(host, "toy", held=[serving(resident.tag)], epoch=1) as puppet:
        puppet.hear("welcome")
        puppet.hand_back(puppet.hear("hand_back"), resident)
    host.awaited(lambda: not host.status().inferds, "the lease to end")
    toy = host.awaited(
        lambda: next((m for m in host.status().models if m.model == "toy" and m.active), None), "v9"
    )
    assert toy.active.to_tag() == resident.tag


def test_other_memory_than_was_asked_for_is_not_adopted(host: ServingHost, resident: ResidentVersion) -> None:
    """It is in itself what it says that it is; but it is not what the inferd was asked for."""
    other = make_resident(HostBackend(), "v8", {"w": b"y" * 5000}, model="swapped")
    asked = make_resident(HostBackend(), "v9", {"w": b"x" * 5000}, model="swapped")
    before = memfds(host.loaderd.pid)
    with Puppet(host, "swapped", held=[serving(asked.tag)], epoch=1) as puppet:
        puppet.hear("welcome")
        with suppress(BrokenPipeError):  # the first frame may have been enough
            puppet.hand_back(puppet.hear("hand_back"), other)
        puppet.hear_end()
    host.awaited(lambda: events_of(host, "lease.closed", "swapped"), "the lease to end")
    assert next(m for m in host.status().models if m.model == "swapped").active is None
    assert memfds(host.loaderd.pid) == before
    for version in (other, asked):
        for slab in version.slabs:
            slab.close()


def test_an_epoch_that_no_loaderd_can_have_reached_is_not_followed(host: ServingHost) -> None:
    host.push("v1")
    active = host.active()
    assert active is not None
    epoch = host.model().epoch
    with Puppet(host, MODEL, held=[serving(active)], epoch=(1 << 63) - 1) as puppet:
        puppet.hear("welcome")
        puppet.hear_end()
    host.awaited(lambda: events_of(host, "inferd.not_reconciled", MODEL), "the refusal")
    assert host.model().epoch == epoch
    with Puppet(host, MODEL, held=[serving(active)], epoch=epoch) as puppet:
        puppet.hear("welcome")
        puppet.report({"slot": 0, "state": "serving", "tag": wire(active)}, epoch=(1 << 63) - 1)
        puppet.hear_end()
    assert host.model().epoch == epoch


def test_an_inferd_has_no_more_than_two_slots(host: ServingHost, resident: ResidentVersion) -> None:
    """Else one frame would make loaderd wait for the release of hundreds of versions, one by one."""
    with Puppet(host, "many", held=[serving(resident.tag, slot=n % 2) for n in range(3)]) as puppet:
        puppet.hear_end()
    with Puppet(host, "many") as puppet:
        puppet.hear("welcome")
        puppet.report(*({"slot": n % 2, "state": "retained", "tag": wire(resident.tag)} for n in range(3)))
        puppet.hear_end()


def test_what_a_failed_first_push_left_mapped_is_asked_for_again(host: ServingHost) -> None:
    """Nothing is active yet, so nothing else would ever make room for another try."""
    with Puppet(host, "first") as puppet:
        puppet.hear("welcome")
        operation = host.start_push_of("first-v1")
        request = puppet.hear("prepare")
        puppet.hear("slab_batch")
        # Another tag than was offered: not prepared, and whether it is mapped is anybody's guess.
        wrong = request["tag"] | {"version": "v7"}
        puppet.prepared(request | {"tag": wrong})
        assert host.ended(operation).state == "failed"
        assert any(v.tag.model == "first" for v in host.status().versions), "counted while it may be mapped"
        release = puppet.hear("release")
        assert release["tag"] == request["tag"]
        puppet.answer(release, "released")
        host.awaited(lambda: not any(v.tag.model == "first" for v in host.status().versions), "its memory")


def test_the_same_refusal_is_journaled_once(host: ServingHost) -> None:
    """An inferd that is refused tries again every other second, for ever."""
    for _ in range(3):
        with Puppet(host, "wrong", backend="cuda") as puppet:
            puppet.hear("refused")
    assert len(events_of(host, "lease.refused", "wrong")) == 1


def test_content_that_is_handed_back_while_it_is_loaded_is_resident_once(host: ServingHost) -> None:
    """Both would become active otherwise, one of them as the way back to the other."""
    with Puppet(host, "lent") as lender:
        lender.hear("welcome")
        host.start_push_of("lent-v1")
        prepare, tables = lender.hear_with_fds("prepare")
        batch, slabs = lender.hear_with_fds("slab_batch")
        held = {"tag": prepare["tag"] | {"model": "twin"}, "slot": 0, "state": "serving", "epoch": 1}
        with Puppet(host, "twin", name="other", held=[held], epoch=1) as puppet:
            puppet.hear("welcome")
            request = puppet.hear("hand_back")
            operation = host.start_push_of("twin-v1")
            host.awaited(
                lambda: host.operation(operation).verify_s, "the load, which waits for the slots then"
            )
            first = {"kind": "handed_back", "request_id": request["request_id"], "tag": request["tag"]}
            puppet.say(first | {"slabs": prepare["slabs"]}, tables)
            puppet.say(batch | {"request_id": request["request_id"]}, slabs)
            report = host.done(operation)
            assert report.warnings[-1].endswith("serves already; nothing was changed")
            status = host.status()
            (version,) = (version for version in status.versions if version.tag.model == "twin")
            assert version.state == "active"
            twin = next(model for model in status.models if model.model == "twin")
            assert (twin.epoch, twin.retained) == (1, None)
    for fd in (*tables, *slabs):
        os.close(fd)
