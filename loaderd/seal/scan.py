"""One pass over a file: its flat SHA-256 and, of a weight file, CRC32 and leaves of every tensor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256

from loaderd.checkpoint.checkpoint import Checkpoint, ParsedHeader
from loaderd.checkpoint.header import TensorSource
from shared._native import crc32, sha256_leaves
from shared.digest import LEAF_BYTES, digest_of
from shared.errors import CheckpointError, DriverError
from shared.ids import Digest

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all, from any thread, one call at a time."""

_CHUNK_BYTES = 16 * LEAF_BYTES


@dataclass(frozen=True, slots=True)
class TensorScan:
    """What a tensor's bytes hash to."""

    crc32: int
    leaves: bytes


@dataclass(frozen=True, slots=True)
class FileScan:
    """What a file's bytes hash to; only a weight file has tensors."""

    sha256: Digest
    tensors: Mapping[str, TensorScan]


def scan_checkpoint(
    checkpoint: Checkpoint,
    others: Sequence[str] = (),
    *,
    has_weights: bool = True,
    jobs: int = 1,
    progress: Progress | None = None,
) -> dict[str, FileScan]:
    """Read every weight file once, unless told not to, and the `others`: paths of files below the folder.

    On `jobs` threads: so many files at a time, each through one buffer of 4 MiB; a weight file takes two
    threads where there are fewer files.  Blocking.  Raises CheckpointError if a
    file ends early or one of the others changes, DriverError on a read error; the first error, also
    one that `progress` raises, stops the other files.
    """
    by_file: dict[str, list[TensorSource]] = {file: [] for file in checkpoint.files if has_weights}
    for tensor in checkpoint.tensors:
        if has_weights:
            by_file[tensor.file].append(tensor)
    total_bytes = sum(checkpoint.file_bytes(file) for file in by_file)
    for path in others:
        with checkpoint.open_below(path) as source:
            total_bytes += source.nbytes
    meter = _Meter(total_bytes, progress)
    spare = max(0, jobs - len(by_file) - len(others))

    def scan(file: str) -> FileScan:
        try:
            if file in by_file:
                fd, nbytes = checkpoint.borrow_fd(file), checkpoint.file_bytes(file)
                reader = _FileReader(file, fd, nbytes, meter, helpers if spare else None)
                reader.check_header(checkpoint.header(file))
                return reader.scan(by_file[file])
            with checkpoint.open_below(file) as source:
                done = _FileReader(file, source.borrow_fd(), source.nbytes, meter).scan([])
                source.verify_unchanged()
                return done
        except BaseException:
            meter.stop()
            raise

    with (
        ThreadPoolExecutor(max_workers=max(spare, 1), thread_name_prefix="scan-flat") as helpers,
        ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="scan") as pool,
    ):
        futures = {file: pool.submit(scan, file) for file in (*by_file, *others)}
        scans: dict[str, FileScan] = {}
        stopped: _StoppedError | None = None
        for file, future in futures.items():
            try:
                scans[file] = future.result()
            except _StoppedError as error:
                stopped = error
    if stopped is not None:
        raise stopped
    return scans


class _StoppedError(Exception):
    """Another file of the same scan failed."""


class _Meter:
    """Counts bytes over all threads, and passes the word to stop."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total = total_bytes
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()
        self._is_stopped = False

    def add(self, nbytes: int) -> None:
        if self._is_stopped:
            raise _StoppedError
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def stop(self) -> None:
        self._is_stopped = True


class _FileReader:
    """Reads one file front to back; with a helper, leaves and flat digest are computed side by side."""

    def __init__(
        self, file: str, borrow_fd: int, nbytes: int, meter: _Meter, helper: Executor | None = None
    ) -> None:
        self._file = file
        self._fd = borrow_fd
        self._nbytes = nbytes
        self._meter = meter
        self._buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(self._nbytes, 1))))
        self._offset = 0
        self._flat = sha256()
        self._helper = helper
        self._hashing: Future[None] | None = None  # the flat digest of what is in the buffer

    def check_header(self, parsed: ParsedHeader) -> None:
        """Read the header; raises CheckpointError unless it is the one that says where the tensors are.

        Times of files are too coarse to show that alone: what is hashed must be what was parsed.
        """
        found = sha256()
        while self._offset < parsed.nbytes:
            found.update(self._read(min(parsed.nbytes - self._offset, _CHUNK_BYTES)))
        if found.digest() != parsed.sha256:
            raise CheckpointError("its header changed since it was parsed", file=self._file, byte=0)

    def scan(self, tensors: list[TensorSource]) -> FileScan:
        with suppress(OSError):  # advice only
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        scans: dict[str, TensorScan] = {}
        for tensor in sorted(tensors, key=lambda entry: (entry.file_offset, entry.nbytes)):
            self._skip_to(tensor.file_offset)
            scans[tensor.name] = self._tensor(tensor)
        self._skip_to(self._nbytes)
        self._await_flat()
        return FileScan(digest_of(self._flat.digest()), scans)

    def _tensor(self, tensor: TensorSource) -> TensorScan:
        checksum = 0
        leaves = bytearray()
        left = tensor.nbytes
        while left:
            # Chunks start where the tensor does, so that they are whole leaves.
            chunk = self._read(min(left, _CHUNK_BYTES))
            checksum = crc32(chunk, checksum)
            leaves += sha256_leaves(chunk, LEAF_BYTES)
            left -= len(chunk)
        return TensorScan(checksum, bytes(leaves))

    def _skip_to(self, offset: int) -> None:
        """Hash what belongs to no tensor, which the index leaves out."""
        while self._offset < offset:
            self._read(min(offset - self._offset, _CHUNK_BYTES))

    def _read(self, nbytes: int) -> memoryview:
        """The next `nbytes`, valid until the next call."""
        self._await_flat()
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [self._buffer[done:nbytes]], self._offset + done)
            except OSError as error:
                raise DriverError(
                    "preadv", error.errno or 0, f"{self._file} at {self._offset + done}: {error.strerror}"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"ends early: it had {self._nbytes} bytes when it was opened",
                    file=self._file,
                    byte=self._offset + done,
                )
            done += count
        chunk = self._buffer[:nbytes]
        if self._helper is None:
            self._flat.update(chunk)
        else:
            self._hashing = self._helper.submit(self._flat.update, chunk)
        self._offset += nbytes
        self._meter.add(nbytes)
        return chunk

    def _await_flat(self) -> None:
        if self._hashing is not None:
            self._hashing.result()
