"""The stage in which signed files are hashed: its progress, its end, and that no thread outlives it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from loaderd import planning
from loaderd.checkpoint.checkpoint import Checkpoint, open_directory
from loaderd.chronicle import Chronicle
from loaderd.journal import Journal
from loaderd.operations import Operation, Operations
from loaderd.planning import OpenedCheckpoint
from loaderd.proof import Proof
from loaderd.proving import hash_signed
from loaderd.seal.create import seal_directory
from loaderd.seal.document import Seal, read_seal
from loaderd.seal.scan import Progress
from loaderd.signature.check import SignedFolder, check_signature
from shared.codec import CONTROL_FRAME_BYTES, decode
from shared.control import Event
from shared.errors import SignatureRefused, Superseded
from shared.gate import Gate
from shared.ids import Generation, OperationId, VersionRef
from tests.support.signing import KeyPair, sign_by_reference
from tests.unit.checkpoint_files import write_single

REF = VersionRef("m", "v1")


class Events:
    """A publisher that keeps what it is given."""

    def __init__(self) -> None:
        self.kinds: list[tuple[str, str]] = []

    def send_multipart(self, msg_parts: Any, flags: int = 0) -> None:
        event = decode(msg_parts[-1], TypeAdapter(Event), CONTROL_FRAME_BYTES)
        self.kinds.append((event.kind, event.text))


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def operations(tmp_path: Path, events: Events) -> Iterator[Operations]:
    with Journal(tmp_path / "journal.jsonl") as journal:
        yield Operations(Chronicle(journal, Generation("g"), events))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_single(tmp_path / "m-v1", {"w": ("U8", [4], b"1234")})


def opened(folder: Path, keys: KeyPair) -> OpenedCheckpoint:
    checkpoint = open_directory(folder)
    signed = check_signature(checkpoint, (keys.trusted,))
    seal = read_seal(checkpoint.seal_bytes) if checkpoint.seal_bytes is not None else None
    return OpenedCheckpoint(REF, folder.name, checkpoint, seal, signed)


def test_only_what_nothing_else_is_held_against_is_hashed(folder: Path, keys: KeyPair) -> None:
    seal_directory(folder, key=keys.signing)
    with opened(folder, keys).checkpoint as checkpoint:
        plain = OpenedCheckpoint(REF, "m-v1", checkpoint, None)
        assert (plain.is_proven, plain.proof) == (True, Proof())
    sealed = opened(folder, keys)
    assert (sealed.is_proven, sealed.proof) == (True, Proof("signed", keys.trusted.hint))
    sealed.close()
    (folder / "README.md").write_text("x")
    seal_directory(folder, key=keys.signing)
    beside = opened(folder, keys)
    assert not beside.is_proven
    assert beside.proven(lambda done, total: None).seal == beside.seal
    beside.close()


def test_a_folder_without_a_seal_gets_one(
    folder: Path, keys: KeyPair, operations: Operations, events: Events
) -> None:
    expected = seal_directory(folder)
    (folder / "seal.json").unlink()
    sign_by_reference(folder, keys)
    operation = operations.start("push", REF)
    before = opened(folder, keys)
    after = asyncio.run(hash_signed(operation, before, operations, threading.Event(), Gate()))
    assert (before.seal, after.seal, after.checkpoint is before.checkpoint) == (None, expected, True)
    assert (after.is_proven or after.seal is not None, after.proof.verified) == (True, "signed")
    assert events.kinds[1:] == [("operation.stage", "hashing"), ("operation.progress", "hashing")]
    assert (operation.bytes_read, operation.bytes_total) == (0, 0), "the next stage counts anew"
    after.close()


def test_an_altered_file_ends_it(folder: Path, keys: KeyPair, operations: Operations) -> None:
    sign_by_reference(folder, keys)
    before = opened(folder, keys)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"1234", b"1235"))
    before.close()
    before = opened(folder, keys)
    operation = operations.start("push", REF)
    with pytest.raises(SignatureRefused, match=r"^model\.safetensors: is sha256:"):
        asyncio.run(hash_signed(operation, before, operations, threading.Event(), Gate()))
    before.close()


def run_slowly(
    folder: Path,
    keys: KeyPair,
    operations: Operations,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[
        [Operation, asyncio.Task[OpenedCheckpoint], threading.Event], Coroutine[Any, Any, None]
    ],
) -> list[str]:
    """Do something while the thread is hashing, and see what the thread saw."""
    sign_by_reference(folder, keys)
    hashing, go_on = threading.Event(), threading.Event()
    story: list[str] = []

    def slow(
        checkpoint: Checkpoint, signed: SignedFolder, seal: Seal | None, *, jobs: int, progress: Progress
    ) -> Seal:
        progress(1, 4)
        hashing.set()
        assert go_on.wait(30)
        checkpoint.borrow_fd("model.safetensors")  # raises if it was closed
        try:
            progress(2, 4)
        except Superseded:
            story.append("the thread was told")
            raise
        story.append("the thread was not told")
        return seal_directory(folder)

    monkeypatch.setattr(planning, "prove", slow)

    async def scenario() -> None:
        # Called when a future goes whose error nobody has looked at.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: story.append("unseen"))
        before = opened(folder, keys)
        operation = operations.start("push", REF)
        cancelled = threading.Event()
        task = asyncio.create_task(hash_signed(operation, before, operations, cancelled, Gate()))
        await asyncio.to_thread(hashing.wait)
        await meanwhile(operation, task, cancelled)
        go_on.set()
        try:
            await task
        except (Superseded, asyncio.CancelledError) as error:
            story.append(type(error).__name__)
        before.close()

    asyncio.run(scenario())
    gc.collect()
    return story


def test_a_newer_push_ends_it(
    folder: Path, keys: KeyPair, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def supersede(
        operation: Operation, task: asyncio.Task[OpenedCheckpoint], cancelled: threading.Event
    ) -> None:
        assert (operation.bytes_read, operation.bytes_total) == (1, 4)
        operation.superseded_by = OperationId("newer")
        cancelled.set()

    story = run_slowly(folder, keys, operations, monkeypatch, supersede)
    assert story == ["the thread was told", "Superseded"]


def test_an_end_of_the_daemon_waits_for_the_thread(
    folder: Path, keys: KeyPair, operations: Operations, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel(
        operation: Operation, task: asyncio.Task[OpenedCheckpoint], cancelled: threading.Event
    ) -> None:
        task.cancel()
        await asyncio.to_thread(cancelled.wait)

    story = run_slowly(folder, keys, operations, monkeypatch, cancel)
    assert story == ["the thread was told", "CancelledError"]
