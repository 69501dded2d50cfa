"""One version as a sequence of frames with fds, and back: used in both directions of a handoff.

The first frame (`Prepare` or `HandedBack`) carries the layout table and the assets as two sealed
memfds; `SlabBatch` frames with the slabs' fds follow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from shared.asset_bundle import ASSETS_LIMIT_BYTES, decode_assets, encode_assets
from shared.closing import Closing
from shared.errors import ProtocolError
from shared.fdpass import ReceivedFds
from shared.handoff import FDS_PER_FRAME, SlabBatch, SlabHandle
from shared.ids import VersionTag
from shared.layout import Layout
from shared.layout_table import LAYOUT_LIMIT_BYTES, decode_layout, encode_layout
from shared.memory.backend import MemoryBackend, Slab
from shared.resident import ResidentVersion
from shared.sealed_memfd import read_sealed_memfd, sealed_memfd

TABLE_FDS = 2  # layout table, assets


@contextmanager
def table_fds(version: ResidentVersion) -> Iterator[tuple[int, int]]:
    """The two fds of a transfer's first frame, closed at the end of the block."""
    with ExitStack() as cleanup:
        layout_fd = sealed_memfd(encode_layout(version.layout), "changeover-layout")
        cleanup.callback(os.close, layout_fd)
        assets_fd = sealed_memfd(encode_assets(version.assets), "changeover-assets")
        cleanup.callback(os.close, assets_fd)
        yield layout_fd, assets_fd


def slab_batches(request_id: int, slabs: Sequence[Slab]) -> Iterator[tuple[SlabBatch, list[int]]]:
    """The frames that follow, each with the fds it borrows from the slabs."""
    for first in range(0, len(slabs), FDS_PER_FRAME):
        batch = slabs[first : first + FDS_PER_FRAME]
        handles = tuple(
            SlabHandle(slab_id=s.entry.slab_id, device=s.entry.device, nbytes=s.entry.nbytes) for s in batch
        )
        yield (
            SlabBatch(request_id=request_id, first=first, slabs=handles),
            [slab.borrow_fd() for slab in batch],
        )


class IncomingVersion(Closing):
    """A transfer as it arrives; owns its fds until `map` consumes them.

    Nothing received is trusted: the tables are validated, every slab is checked by the backend
    against the entry that the table has for it, and a transfer out of order is refused.
    """

    def __init__(self, tag: VersionTag, request_id: int, slab_count: int, fds: ReceivedFds) -> None:
        """Take the first frame's fds.  Raises ProtocolError if there are not two of them."""
        if len(fds) != TABLE_FDS:
            raise ProtocolError(f"a transfer starts with {TABLE_FDS} fds, got {len(fds)}")
        self.tag = tag
        self.request_id = request_id
        self._slab_count = slab_count
        self._received: list[tuple[SlabHandle, int]] = []
        self._tables = (fds.take(0), fds.take(1))
        self._has_tables = True

    @property
    def is_complete(self) -> bool:
        """All slabs have arrived."""
        return len(self._received) == self._slab_count

    def add(self, batch: SlabBatch, fds: ReceivedFds) -> None:
        """Take the fds of one batch.  Raises ProtocolError if it is not the one expected next."""
        expected = len(self._received)
        if batch.request_id != self.request_id or batch.first != expected:
            raise ProtocolError(
                f"slab batch {batch.first} of transfer {batch.request_id} came where "
                f"{expected} of {self.request_id} was due"
            )
        if len(fds) != len(batch.slabs) or expected + len(fds) > self._slab_count:
            raise ProtocolError(f"a batch of {len(batch.slabs)} slabs came with {len(fds)} fds")
        for index, handle in enumerate(batch.slabs):
            self._received.append((handle, fds.take(index)))

    def map(self, backend: MemoryBackend) -> ResidentVersion:
        """Read the tables and map every slab for reading; the caller owns the version's slabs.

        Consumes the transfer, on every path.  Blocking.  Raises ProtocolError if tables and slabs
        do not belong together, DriverError if mapping fails.
        """
        with self:
            if not self.is_complete:
                raise ProtocolError(f"{len(self._received)} of {self._slab_count} slabs arrived")
            layout, assets = self._read_tables()
            if len(layout.slabs) != len(self._received):
                raise ProtocolError(
                    f"the table names {len(layout.slabs)} slabs, {len(self._received)} arrived"
                )
            with ExitStack() as undo:
                slabs: list[Slab] = []
                for entry in layout.slabs:
                    handle, fd = self._received.pop(0)
                    if (handle.slab_id, handle.device, handle.nbytes) != (
                        entry.slab_id,
                        entry.device,
                        entry.nbytes,
                    ):
                        os.close(fd)
                        raise ProtocolError(f"slab {handle.slab_id} arrived where {entry.slab_id} was due")
                    slab = backend.import_slab(entry, fd)
                    undo.callback(slab.close)
                    slabs.append(slab)
                undo.pop_all()
            return ResidentVersion(self.tag, layout, tuple(slabs), assets)

    def _read_tables(self) -> tuple[Layout, dict[str, bytes]]:
        layout_fd, assets_fd = self._tables
        self._has_tables = False
        try:
            layout = decode_layout(read_sealed_memfd(layout_fd, LAYOUT_LIMIT_BYTES))
        except BaseException:
            os.close(assets_fd)
            raise
        return layout, decode_assets(read_sealed_memfd(assets_fd, ASSETS_LIMIT_BYTES))

    def close(self) -> None:
        """Close every fd that was not consumed."""
        if self._has_tables:
            self._has_tables = False
            for fd in self._tables:
                os.close(fd)
        while self._received:
            os.close(self._received.pop()[1])
