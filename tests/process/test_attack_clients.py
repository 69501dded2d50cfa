"""Clients that flood, do not listen, or ask for more than a reader may have: others are served as before."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgpack
import pytest
import zmq

from shared.codec import CONTROL_FRAME_BYTES, PROTOCOL_VERSION
from shared.control import Diff, DiffReport, Push, PushReply
from shared.errors import CheckpointError, InvalidRequest
from tests.support.procfs import private_bytes
from tests.support.serving_host import ServingHost, serving_host

ENTRIES = 1000


def request(verb: str, **fields: object) -> bytes:
    """A request frame that does not expire."""
    frame: bytes = msgpack.packb(
        {
            "protocol": PROTOCOL_VERSION,
            "request_id": "r",
            "deadline_ns": (1 << 63) - 1,
            "body": {"verb": verb, **fields},
        }
    )
    return frame


@pytest.fixture(scope="module")
def host(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingHost]:
    """A loaderd with a long history and two versions, one of them not sealed."""
    root = tmp_path_factory.mktemp("asked")
    shutil.copytree(models / "tiny-v1", root / "tiny-v1")
    shutil.copytree(models / "tiny-v2", root / "tiny-v2", ignore=shutil.ignore_patterns("seal.json"))
    with serving_host(root, 'log_level = "warning"') as host:
        host.state_dir.mkdir()
        entry = {"time_ns": 1, "kind": "made.up", "cause": "x" * 800}
        lines = [json.dumps({"sequence": number, **entry}) for number in range(1, ENTRIES + 1)]
        host.journal.write_text("".join(f"{line}\n" for line in lines))
        host.start_loaderd()
        host.push("v1")
        yield host
        assert host.loaderd.is_running


def test_a_flood_of_frames_leaves_others_their_turn(host: ServingHost) -> None:
    """There is always a next frame, so receiving never waits."""
    is_over = threading.Event()

    def flood() -> None:
        with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(f"ipc://{host.run_dir.control}")
            while not is_over.is_set():
                try:
                    dealer.send(b"no request", zmq.DONTWAIT)
                except zmq.Again:
                    dealer.poll(1, zmq.POLLOUT)

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        for _ in range(5):
            assert host.get(host.run_dir.loaderd_health, "/livez").status_code == 200
            assert host.active() is not None
    finally:
        is_over.set()
        flooding.join()


def test_replies_that_nobody_reads_take_little_memory(host: ServingHost) -> None:
    before = private_bytes(host.loaderd.pid)
    with zmq.Context() as context, closing(context.socket(zmq.DEALER)) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.connect(f"ipc://{host.run_dir.control}")
        for _ in range(300):
            dealer.send(request("history", model=None, limit=ENTRIES))
        # Answered in turn: what this client is owed is more than what all of those are about.
        for _ in range(10):
            host.history(ENTRIES)
        grown = private_bytes(host.loaderd.pid) - before
    assert grown < 64 * CONTROL_FRAME_BYTES, f"{grown} bytes for one client"


def test_a_reader_cannot_have_a_whole_folder_read(host: ServingHost) -> None:
    with pytest.raises(InvalidRequest, match="tiny-v2 is not resident and has no seal"):
        host.control.ask(Diff(before="tiny-v1", after="tiny-v2"), DiffReport)


@pytest.mark.parametrize("place", ["key", "value"])
def test_text_that_is_no_unicode_is_refused_with_its_place(
    host: ServingHost, models: Path, place: str
) -> None:
    """JSON can spell a lone surrogate, which no frame can carry."""
    folder = host.model_root / "tiny-v7"
    shutil.copytree(models / "tiny-v1", folder, ignore=shutil.ignore_patterns("seal.json"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"a\ud800": 1} if place == "key" else {"a": "b\udc00"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="holds a lone surrogate") as refused:
        host.control.ask(Push(name="tiny-v7"), PushReply)
    assert refused.value.file == "tiny-v7/config.json"
    shutil.rmtree(folder)
