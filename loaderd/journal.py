"""The journal: every transition with its cause, durable, and what a restarted loaderd knows from it.

One JSON object per line, appended and synced.  A crash can tear the last line only; a torn last line
is dropped at the next start.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from pydantic import ValidationError

from loaderd.proof import Proof
from shared.closing import Closing
from shared.control import HistoryEntry, Verified
from shared.errors import Fact, InvalidName, ResourceError
from shared.ids import Digest, Epoch, VersionRef, VersionTag, check_name
from shared.messages import Count, DigestText, WireModel

log = structlog.get_logger(__name__)

COMMITTED = "commit"
JOURNAL_MODE = 0o640
KEEP_ENTRIES = 5_000
COMPACT_ABOVE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Committed:
    """The newest commit of a model that the journal knows, and what was active before that content was."""

    tag: VersionTag
    epoch: Epoch
    previous: VersionTag | None
    proofs: Mapping[VersionTag, Proof]  # of both

    def proof_of(self, tag: VersionTag) -> Proof:
        """What the bytes of exactly this content were held against when they were committed."""
        return self.proofs.get(tag, Proof())


class Commit(WireModel):
    """The data of a commit's entry."""

    digest: DigestText
    epoch: Count
    verified: Verified = "digest"
    key: str = ""


@dataclass(slots=True)
class Recollection:
    """What the journal says about the time before this start."""

    sequence: int = 0
    committed: dict[str, Committed] = field(default_factory=dict)


class Journal(Closing):
    """Append-only history of one loaderd.  Used from the event loop's thread only."""

    def __init__(self, path: Path) -> None:
        """Open or create the journal at `path`; raises ResourceError if it is damaged before its last line,
        or cannot be read or written."""
        self._path = path
        self.recollection = Recollection()
        self._recent: deque[HistoryEntry] = deque(maxlen=KEEP_ENTRIES)
        entries, intact_bytes = _read(path)
        for entry in entries:
            self._recent.append(entry)
            _recall(self.recollection, entry)
        try:
            if intact_bytes > COMPACT_ABOVE_BYTES:
                _rewrite(path, _worth_keeping(entries))
                intact_bytes = path.stat().st_size
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, JOURNAL_MODE)
            os.ftruncate(self._fd, intact_bytes)
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:
            raise ResourceError(f"the journal {path} cannot be written: {error.strerror}") from error

    def append(
        self,
        kind: str,
        *,
        model: str = "",
        version: str = "",
        operation: str = "",
        cause: str = "",
        data: Mapping[str, Fact] | None = None,
        durable: bool = False,
    ) -> HistoryEntry:
        """Write one entry; with `durable` it is on disk when this returns (blocking for one fdatasync).
        Raises ResourceError if the disk refuses it; the journal then is as it was."""
        entry = HistoryEntry(
            sequence=self.recollection.sequence + 1,
            time_ns=time.time_ns(),
            kind=kind,
            model=model,
            version=version,
            operation=operation,
            cause=cause,
            data=dict(data or {}),
        )
        self._write(_line(entry), durable)
        self._recent.append(entry)
        _recall(self.recollection, entry)
        return entry

    def commit(self, tag: VersionTag, proof: Proof, epoch: Epoch, operation: str, cause: str) -> None:
        """Record, durably, that `tag` is the active version of its model from `epoch` on."""
        data: dict[str, Fact] = {"digest": tag.digest, "epoch": epoch, "verified": proof.verified}
        if proof.key:
            data["key"] = proof.key
        self.append(
            COMMITTED,
            model=tag.ref.model,
            version=tag.ref.version,
            operation=operation,
            cause=cause,
            data=data,
            durable=True,
        )

    def newest(self, model: str | None, limit: int) -> tuple[HistoryEntry, ...]:
        """The newest `limit` entries (of one model), oldest first."""
        chosen: list[HistoryEntry] = []
        for entry in reversed(self._recent):
            if len(chosen) == limit:
                break
            if model is None or entry.model == model:
                chosen.append(entry)
        return tuple(reversed(chosen))

    def _write(self, line: bytes, durable: bool) -> None:
        end = os.lseek(self._fd, 0, os.SEEK_CUR)
        try:
            view = memoryview(line)
            while view:
                view = view[os.write(self._fd, view) :]
            if durable:
                os.fdatasync(self._fd)
        except OSError as error:
            self._cut(end)
            raise ResourceError(f"the journal {self._path} cannot be written: {error.strerror}") from error

    def _cut(self, end: int) -> None:
        """Half a line in the middle of the file would make the whole journal unreadable."""
        try:
            os.lseek(self._fd, end, os.SEEK_SET)  # whatever happens, the next line overwrites the half one
            os.ftruncate(self._fd, end)
        except OSError as error:
            log.error("journal.not_cut", path=str(self._path), error=error.strerror)

    def close(self) -> None:
        """Sync and close the file."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            log.error("journal.not_synced", path=str(self._path), error=error.strerror)
        finally:
            os.close(self._fd)


def _line(entry: HistoryEntry) -> bytes:
    return json.dumps(entry.model_dump(), separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> tuple[list[HistoryEntry], int]:
    """Entries and the length in bytes of the intact part."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    except OSError as error:
        raise ResourceError(f"the journal {path} cannot be read: {error.strerror}") from error
    entries: list[HistoryEntry] = []
    intact = 0
    for line in _lines(raw):
        try:
            entry = HistoryEntry.model_validate_json(line, strict=True)
            _recall(Recollection(), entry)  # a commit must be one
            entries.append(entry)
        except (ValidationError, InvalidName) as error:
            if intact + len(line) == len(raw):
                break  # torn by a crash while it was written
            raise ResourceError(
                f"the journal {path} is damaged in line {len(entries) + 1}; put it aside "
                f"(`mv {path} {path}.damaged`): what serves is then found out from the inferds, and where "
                "there is none, push it again"
            ) from error
        intact += len(line)
    return entries, intact


def _lines(raw: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(raw):
        end = raw.find(b"\n", start) + 1
        if end == 0:
            return  # no newline: torn
        yield raw[start:end]
        start = end


def _recall(recollection: Recollection, entry: HistoryEntry) -> None:
    recollection.sequence = max(recollection.sequence, entry.sequence)
    if entry.kind != COMMITTED:
        return
    commit = Commit.model_validate(entry.data, strict=True)
    ref = VersionRef(check_name(entry.model, "model"), check_name(entry.version, "version"))
    tag, before = VersionTag(ref, Digest(commit.digest)), recollection.committed.get(entry.model)
    previous, proofs = None, {tag: Proof(commit.verified, commit.key)}
    if before is not None:
        # What is committed again, as by a restore, has the same way back as it had.
        previous = before.previous if before.tag == tag else before.tag
        if previous is not None:
            proofs[previous] = before.proof_of(previous)
    recollection.committed[entry.model] = Committed(tag, Epoch(commit.epoch), previous, proofs)


def _worth_keeping(entries: list[HistoryEntry]) -> Iterable[HistoryEntry]:
    """The newest entries, and of each model, however old they are, the commits of what was active last and
    before that."""
    commits: dict[str, list[HistoryEntry]] = {}
    for entry in entries:
        if entry.kind == COMMITTED:
            others = [one for one in commits.get(entry.model, []) if _content(one) != _content(entry)]
            commits[entry.model] = [*others[-1:], entry]
    keep = {entry.sequence for pair in commits.values() for entry in pair}
    keep |= {entry.sequence for entry in entries[-KEEP_ENTRIES // 2 :]}
    return (entry for entry in entries if entry.sequence in keep)


def _content(commit: HistoryEntry) -> tuple[str, Fact]:
    return commit.version, commit.data["digest"]


def _rewrite(path: Path, entries: Iterable[HistoryEntry]) -> None:
    """Replace the journal atomically."""
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)  # left over from a crash
    with open(fresh, "xb", opener=lambda name, flags: os.open(name, flags, JOURNAL_MODE)) as file:
        for entry in entries:
            file.write(_line(entry))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
