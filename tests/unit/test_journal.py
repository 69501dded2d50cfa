"""The journal: what a restarted loaderd reads back, after clean ends, crashes and full disks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loaderd import journal as journal_module
from loaderd.journal import Journal
from loaderd.proof import Proof
from shared.errors import ResourceError
from shared.ids import Digest, Epoch, VersionRef, VersionTag


def _tag(version: str, fill: str = "a") -> VersionTag:
    return VersionTag(VersionRef("smollm2", version), Digest("sha256:" + fill * 64))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_it_remembers_the_last_two_commits(path: Path) -> None:
    with Journal(path) as journal:
        journal.commit(_tag("v1"), Proof(), Epoch(1), "op1", "first")
        journal.append("version.state", model="smollm2", version="v1", cause="x", data={"to": "active"})
        journal.commit(_tag("v2", "b"), Proof(), Epoch(2), "op2", "second")
    with Journal(path) as journal:
        committed = journal.recollection.committed["smollm2"]
        assert committed.tag == _tag("v2", "b")
        assert committed.epoch == 2
        assert committed.previous == _tag("v1")
        assert [entry.kind for entry in journal.newest(None, 10)] == ["commit", "version.state", "commit"]


@pytest.mark.parametrize("is_shortened", [False, True])
def test_what_is_committed_again_keeps_its_way_back(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_shortened: bool
) -> None:
    signed = Proof("signed", "f" * 64)
    with Journal(path) as journal:
        journal.commit(_tag("v0", "c"), Proof(), Epoch(1), "op1", "before both")
        journal.commit(_tag("v1"), signed, Epoch(2), "op2", "first")
        journal.commit(_tag("v2", "b"), Proof(), Epoch(3), "op3", "second")
        journal.commit(_tag("v2", "b"), Proof("sealed"), Epoch(4), "op4", "restored after a restart")
        journal.commit(_tag("v2", "b"), Proof("sealed"), Epoch(5), "", "found out from an inferd")
    if is_shortened:
        monkeypatch.setattr(journal_module, "KEEP_ENTRIES", 2)
        monkeypatch.setattr(journal_module, "COMPACT_ABOVE_BYTES", 0)
    Journal(path).close()
    monkeypatch.undo()
    with Journal(path) as journal:
        assert len(journal.newest(None, 10)) == (2 if is_shortened else 5)
        committed = journal.recollection.committed["smollm2"]
        assert (committed.tag, committed.epoch, committed.previous) == (_tag("v2", "b"), 5, _tag("v1"))
        assert (committed.proof_of(committed.tag), committed.proof_of(_tag("v1"))) == (
            Proof("sealed"),
            signed,
        )


def test_sequences_go_on_after_a_restart(path: Path) -> None:
    with Journal(path) as journal:
        first = journal.append("daemon.started")
    with Journal(path) as journal:
        assert journal.append("daemon.started").sequence == first.sequence + 1


@pytest.mark.parametrize("cut_bytes", [1, 5, 40])
def test_a_torn_last_line_is_dropped(path: Path, cut_bytes: int) -> None:
    with Journal(path) as journal:
        journal.commit(_tag("v1"), Proof(), Epoch(1), "op1", "first")
        journal.commit(_tag("v2", "b"), Proof(), Epoch(2), "op2", "second")
    os.truncate(path, path.stat().st_size - cut_bytes)
    with Journal(path) as journal:
        assert journal.recollection.committed["smollm2"].tag == _tag("v1")
        journal.append("daemon.started")
    with Journal(path) as journal:  # what was written after the torn line is readable
        assert [entry.kind for entry in journal.newest(None, 10)] == ["commit", "daemon.started"]


def test_damage_before_the_last_line_is_refused(path: Path) -> None:
    """Not as a configuration: `loaderd --check` would find nothing."""
    with Journal(path) as journal:
        journal.append("daemon.started")
        journal.append("daemon.stopping")
    raw = path.read_bytes()
    path.write_bytes(b"{" + raw[2:])
    with pytest.raises(ResourceError) as caught:
        Journal(path)
    assert caught.value.code == "resource"
    assert caught.value.message == (
        f"the journal {path} is damaged in line 1; put it aside (`mv {path} {path}.damaged`): what serves is "
        "then found out from the inferds, and where there is none, push it again"
    )


def test_a_full_disk_leaves_the_journal_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal(path) as journal:
        journal.append("daemon.started")
        before = path.read_bytes()
        real_write = os.write

        def half(fd: int, data: memoryview) -> int:
            if len(data) > 20:
                return real_write(fd, data[:20])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(journal_module.os, "write", half)
        with pytest.raises(ResourceError, match="No space left"):
            journal.commit(_tag("v1"), Proof(), Epoch(1), "op", "never decided")
        monkeypatch.undo()
        assert path.read_bytes() == before
        assert journal.recollection.committed == {}
        journal.append("daemon.stopping")
    with Journal(path) as journal:
        assert [entry.kind for entry in journal.newest(None, 10)] == ["daemon.started", "daemon.stopping"]


def test_a_long_journal_is_shortened_but_keeps_the_commits(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "KEEP_ENTRIES", 20)
    monkeypatch.setattr(journal_module, "COMPACT_ABOVE_BYTES", 1000)
    with Journal(path) as journal:
        journal.commit(_tag("v1"), Proof(), Epoch(1), "op1", "first")
        journal.commit(_tag("v2", "b"), Proof(), Epoch(2), "op2", "second")
        for _ in range(200):
            journal.append("lease.opened", model="smollm2")
        last = journal.append("daemon.stopping").sequence
    size = path.stat().st_size
    with Journal(path) as journal:
        committed = journal.recollection.committed["smollm2"]
        assert (committed.tag, committed.previous) == (_tag("v2", "b"), _tag("v1"))
        assert path.stat().st_size < size / 4
        assert journal.append("daemon.started").sequence == last + 1


def test_newest_is_per_model_and_oldest_first(path: Path) -> None:
    with Journal(path) as journal:
        for number in range(5):
            journal.append("version.state", model="a" if number % 2 else "b", cause=str(number))
        assert [entry.cause for entry in journal.newest("a", 5)] == ["1", "3"]
        assert [entry.cause for entry in journal.newest(None, 2)] == ["3", "4"]


# --- what was proven -----------------------------------------------------------------------------


def test_what_was_proven_is_remembered_of_exactly_that_content(path: Path) -> None:
    signed, sealed = Proof("signed", "f" * 64), Proof("sealed")
    with Journal(path) as journal:
        journal.commit(_tag("v1"), signed, Epoch(1), "op1", "first")
        journal.commit(_tag("v2", "b"), sealed, Epoch(2), "op2", "second")
    with Journal(path) as journal:
        committed = journal.recollection.committed["smollm2"]
        assert (committed.proof_of(_tag("v1")), committed.proof_of(_tag("v2", "b"))) == (signed, sealed)
        for other in (_tag("v1", "b"), _tag("v2", "a"), _tag("v3")):
            assert committed.proof_of(other) == Proof()
        journal.commit(_tag("v1"), Proof(), Epoch(3), "op3", "loaded again, from a folder without a seal")
        committed = journal.recollection.committed["smollm2"]
        assert (committed.proof_of(_tag("v1")), committed.proof_of(_tag("v2", "b"))) == (Proof(), sealed)
        journal.commit(_tag("v1"), signed, Epoch(4), "op4", "the same again")
        assert journal.recollection.committed["smollm2"].proof_of(_tag("v1")) == signed
        assert journal.recollection.committed["smollm2"].proof_of(_tag("v2", "b")) == sealed, "the way back"
        journal.commit(_tag("v3", "c"), Proof(), Epoch(5), "op5", "another")
        assert journal.recollection.committed["smollm2"].proof_of(_tag("v2", "b")) == Proof(), "too long ago"


def test_an_older_journal_proves_nothing_but_the_digest(path: Path) -> None:
    with Journal(path) as journal:
        data: dict[str, str | int | float] = {"digest": _tag("v1").digest, "epoch": 1}
        journal.append("commit", model="smollm2", version="v1", data=data)
    with Journal(path) as journal:
        assert journal.recollection.committed["smollm2"].proof_of(_tag("v1")) == Proof()


def test_a_signature_counts_as_long_as_its_key_is_trusted() -> None:
    signed = Proof("signed", "a")
    assert signed.now({"a", "b"}) == signed
    assert signed.now({"b"}) == signed.now(()) == Proof("digest")
    assert Proof("sealed").now(()) == Proof("sealed")


def test_of_two_proofs_of_one_content_the_stronger_counts() -> None:
    by_a, by_b = Proof("signed", "a"), Proof("signed", "b")
    assert by_a.with_later(Proof("sealed")) == by_a
    assert Proof("sealed").with_later(Proof()) == Proof("sealed")
    assert Proof().with_later(by_b) == by_b
    assert by_a.with_later(by_b) == by_b, "the key that signs now"
