"""Peers that may not, or do not play by the rules: they are refused, and leave nothing behind."""

from __future__ import annotations

import array
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
import pytest
import zmq

from shared.codec import CONTROL_FRAME_BYTES, HANDOFF_FRAME_BYTES, PROTOCOL_VERSION
from shared.handoff import FDS_PER_FRAME
from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support import procfs
from tests.support.serving_host import MODEL, ServingHost, serving_host

NOBODY = 65_534
FAR_NS = (1 << 63) - 1
STATUS = {"verb": "status"}
HELLO = {
    "kind": "hello",
    "protocol": PROTOCOL_VERSION,
    "name": "intruder",
    "model": MODEL,
    "backend": "host",
    "device": "host",
    "engine": "none",
    "flip": "pointer",
    "serves_two_versions": True,
    "epoch": 0,
    "held": [],
}

# In the program, not by exec, and with all of it imported: another user may not be able to read where this
# interpreter and this tree lie.
BECOME_NOBODY = f"""
import os
import loaderd.ctl.app
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[ServingHost]:
    with serving_host(models) as host:
        host.start_loaderd()
        host.start_inferd()
        host.push("v1")
        host.push("v2")
        attach(host).close()  # loaderd has heard of that model from here on
        yield host


@pytest.fixture(autouse=True)
def unimpressed(host: ServingHost, expected: Expected) -> Iterator[None]:
    """loaderd's fds, versions and leases are as before, and it works."""

    def footprint() -> object:
        status = host.status()
        return (
            dict(procfs.fd_kinds(host.loaderd.pid)),
            [(v.tag, v.state) for v in status.versions],
            [(i.name, i.lease) for i in status.inferds],
            [m.model for m in status.models],
        )

    before = footprint()
    pid = host.loaderd.pid
    yield
    host.awaited(lambda: footprint() == before, "loaderd to be as it was", 10)
    assert host.status().pid == pid
    host.rollback()
    host.rollback()
    with host.client() as client:
        assert client.ask(PROMPTS[0], NEW_TOKENS).text == expected["v2"][PROMPTS[0]]


def request(**changes: object) -> bytes:
    fields = {"protocol": PROTOCOL_VERSION, "request_id": "r", "deadline_ns": FAR_NS, "body": STATUS}
    frame: bytes = msgpack.packb(fields | changes)
    return frame


def hello(**changes: object) -> bytes:
    frame: bytes = msgpack.packb(HELLO | changes)
    return frame


# --- another user --------------------------------------------------------------------------------


@needs_root
def test_another_user_may_look_and_not_change(host: ServingHost) -> None:
    host.folder.chmod(0o755)
    host.run_dir.path.chmod(0o755)

    def run(*arguments: str) -> tuple[int, str, str]:
        with host.start_ctl(*arguments, prelude=BECOME_NOBODY) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    code, out, err = run("status", "--json")
    assert code == 0, err
    assert '"v2"' in out
    code, out, err = run("push", "tiny-v3")
    assert code == 7, err
    assert f"uid {NOBODY} may not push" in err
    assert run("rollback")[0] == 7
    assert host.model().active is not None


@needs_root
def test_another_user_may_not_attach(host: ServingHost) -> None:
    reply = as_nobody(lambda: refusal(host, hello()))
    assert reply == f"not_permitted: uid {NOBODY} may not attach"


def as_nobody(work: Callable[[], str]) -> str:
    """What `work` gives in a child process of another user."""
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                exec(BECOME_NOBODY)
                os.write(answer.fileno(), work().encode())
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert status == 0
        answer.seek(0)
        return answer.read().decode()


def refusal(host: ServingHost, frame: bytes) -> str:
    """Code and start of the message with which a hello is refused."""
    with host.seqpacket() as end:
        end.send(frame)
        reply = msgpack.unpackb(end.recv(HANDOFF_FRAME_BYTES))
        assert end.recv(1) == b""
    assert reply["kind"] == "refused"
    return f"{reply['error']['code']}: {reply['error']['message']}".partition(";")[0]


# --- control socket ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "not msgpack"),
        (b"\xc1garbage", "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\x91" * 5_000 + b"\x90", ""),
        (msgpack.packb([1, 2]), "top level"),
        (request(protocol=PROTOCOL_VERSION + 1), "client speaks protocol"),
        (request(extra=1), "extra"),
        (request(body=STATUS | {"force": True}), "force"),
        (request(body={"verb": "shutdown"}), "body"),
        (request(body={"verb": "push", "name": "tiny-v3", "dry_run": 1}), "dry_run"),
        (request(deadline_ns=-1), "deadline_ns"),
        (request(deadline_ns=1), "deadline has passed"),
        (request(request_id="x" * 65), "request_id"),
    ],
)
def test_a_control_frame_that_is_none(host: ServingHost, frame: bytes, words: str) -> None:
    reply = host.ask_raw(frame)
    assert reply["result"] is None
    assert reply["error"]["code"] in ("protocol", "deadline")
    assert words in reply["error"]["message"]


def test_control_messages_of_too_many_parts_and_too_many_bytes(host: ServingHost) -> None:
    with zmq.Context() as context:
        for parts in ([b"", request()], [b"a", b"b", b"c"], [b"\x00" * (CONTROL_FRAME_BYTES + 1)]):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 1000)
            dealer.connect(f"ipc://{host.run_dir.control}")
            dealer.send_multipart(parts)
            assert not dealer.poll(200)
            dealer.close()
    assert host.ask_raw(request())["error"] is None


def test_pushes_whose_deadline_passes_while_the_folder_is_opened(host: ServingHost) -> None:
    for wait_ns in (0, 50_000, 100_000, 200_000, 400_000, 800_000, 1_600_000):
        deadline = time.monotonic_ns() + 1_000_000 + wait_ns
        body = {"verb": "push", "name": "tiny-v3", "dry_run": True}
        host.ask_raw(request(deadline_ns=deadline, body=body))


# --- handoff socket ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "frame",
    [b"\xc1", msgpack.packb({"kind": "report"}), hello(extra=1), hello(held=[{"slot": 7}]), b"x" * 65_536],
)
def test_a_first_frame_that_is_no_hello_ends_the_connection(host: ServingHost, frame: bytes) -> None:
    with host.seqpacket() as end:
        end.send(frame)
        assert end.recv(1) == b""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": PROTOCOL_VERSION + 1}, "protocol: inferd speaks protocol"),
        ({"backend": "cuda"}, "invalid_request: inferd maps 'cuda' memory"),
        ({"device": ""}, "invalid_request: inferd is on device"),
        ({"device": "GPU-0"}, "invalid_request: inferd is on device GPU-0"),
        ({"name": "a"}, "not_permitted: an inferd named a is attached already"),
    ],
)
def test_a_hello_that_does_not_fit(host: ServingHost, changes: dict[str, object], words: str) -> None:
    assert refusal(host, hello(**changes)).startswith(words)


def attach(host: ServingHost) -> socket.socket:
    """A lease of a model that has no version, so that nothing is asked of it."""
    end = host.seqpacket()
    end.send(hello(model="nothing"))
    assert msgpack.unpackb(end.recv(HANDOFF_FRAME_BYTES))["kind"] == "welcome"
    return end


def some_fds(count: int) -> list[int]:
    return [os.memfd_create("unasked") for _ in range(count)]


@pytest.mark.parametrize(
    ("frame", "fds"),
    [
        (hello(), 0),
        (b"\xc1", 0),
        (hello(), 2),
        (msgpack.packb({"kind": "slab_batch", "request_id": 1, "first": 0, "slabs": []}), 1),
        (
            msgpack.packb(
                {
                    "kind": "handed_back",
                    "request_id": 9,
                    "tag": {"model": "nothing", "version": "v1", "digest": "sha256:" + "0" * 64},
                    "slabs": 0,
                }
            ),
            2,
        ),
        (hello(), FDS_PER_FRAME + 20),
    ],
)
def test_a_frame_that_nobody_asked_for_ends_the_lease(host: ServingHost, frame: bytes, fds: int) -> None:
    numbers = some_fds(fds)
    try:
        with attach(host) as end:
            end.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))])
            assert end.recv(1) == b""
    finally:
        for fd in numbers:
            os.close(fd)


def test_fds_that_come_with_a_good_frame_are_closed(host: ServingHost) -> None:
    report = {"kind": "report", "epoch": 0, "slots": [], "running": 0, "waiting": 0, "tokens_generated": 0}
    numbers = some_fds(3)
    with attach(host) as end:
        before = procfs.memfds(host.loaderd.pid)
        end.sendmsg(
            [msgpack.packb(report)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", numbers))]
        )
        host.awaited(lambda: host.status() and procfs.memfds(host.loaderd.pid) == before, "fds to be closed")
    for fd in numbers:
        os.close(fd)


def test_those_who_connect_and_say_nothing_are_hung_up_on(host: ServingHost) -> None:
    ends = [host.seqpacket() for _ in range(20)]
    try:
        # Meanwhile everyone else is served.
        host.rollback()
        host.rollback()
        for end in ends:
            assert end.recv(1) == b""
    finally:
        for end in ends:
            end.close()
