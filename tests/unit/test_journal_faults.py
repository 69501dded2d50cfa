"""A journal that the disk refuses, or that says what cannot be: an error with a name, never a crash later."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loaderd import journal as journal_module
from loaderd.journal import Journal
from loaderd.proof import Proof
from shared.errors import ResourceError
from shared.ids import Digest, Epoch, VersionRef, VersionTag

TAG = VersionTag(VersionRef("smollm2", "v1"), Digest("sha256:" + "a" * 64))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


@pytest.mark.parametrize(
    "change",
    [
        {"data": {"epoch": 1}},
        {"data": {"digest": TAG.digest}},
        {"data": {"digest": "sha256:short", "epoch": 1}},
        {"data": {"digest": TAG.digest, "epoch": 1 << 63}},
        {"data": {"digest": TAG.digest, "epoch": -1}},
        {"model": "../up"},
        {"version": ""},
    ],
)
def test_a_commit_that_cannot_be_is_refused_at_the_start(path: Path, change: dict[str, object]) -> None:
    """Believed, it would come up in every status and every commit of this loaderd's life."""
    with Journal(path) as journal:
        journal.commit(TAG, Proof(), Epoch(1), "op1", "first")
        journal.append("daemon.started")
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(first) | change) + "\n" + "".join(rest))
    with pytest.raises(ResourceError, match="is damaged in line 1;"):
        Journal(path)


def test_a_disk_that_refuses_even_the_clean_up_leaves_the_journal_usable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after `remount-ro`; the next line takes the place of the half one."""

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    write = os.write

    def half(fd: int, data: memoryview) -> int:
        write(fd, data[: len(data) // 2])
        raise OSError(30, "Read-only file system")

    with Journal(path) as journal:
        journal.append("daemon.started")
        with monkeypatch.context() as broken:
            broken.setattr(os, "write", half)
            broken.setattr(os, "ftruncate", refuse)
            with pytest.raises(ResourceError, match="Read-only file system"):
                journal.append("lost", cause="x")
        journal.append("after")
    with Journal(path) as journal:
        assert [entry.kind for entry in journal.newest(None, 10)] == ["daemon.started", "after"]


def test_a_journal_that_cannot_be_opened_is_a_resource_error(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ResourceError, match="cannot be read: Is a directory"):
        Journal(path)
    with pytest.raises(ResourceError, match="cannot be written: No such file or directory"):
        Journal(path / "missing" / "journal.jsonl")


def test_compaction_keeps_the_mode_and_survives_its_own_leftovers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal(path) as journal:
        journal.commit(TAG, Proof(), Epoch(1), "op1", "first")
    monkeypatch.setattr(journal_module, "COMPACT_ABOVE_BYTES", 10)
    path.with_suffix(".new").write_text("left over")
    with Journal(path) as journal:
        assert journal.recollection.committed["smollm2"].tag == TAG
    assert path.stat().st_mode & 0o777 & ~0o640 == 0
    assert not path.with_suffix(".new").exists()
