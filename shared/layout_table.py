"""The layout table as bytes: how a version's tensors and slabs travel to an inference daemon."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from shared.digest import SHA256_BYTES, digest_bytes, digest_of
from shared.errors import ProtocolError
from shared.ids import DeviceId, SlabId
from shared.layout import ALIGNMENT_BYTES, Layout, SlabEntry, TensorEntry
from shared.packed_format import PackedFormat
from shared.tensor_size import MAX_NAME_CHARS, MAX_RANK, MAX_TENSOR_BYTES, MAX_TENSORS, tensor_nbytes

LAYOUT_LIMIT_BYTES = 256 << 20
"""Cap of an encoded table; half a million tensors with long names stay below it."""

MAX_SLABS = 65_536

_FORMAT = PackedFormat("layout table", "changeover-layout", 1, ("slabs", "tensors"))

_SLAB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")


def encode_layout(layout: Layout) -> bytes:
    """Serialise a layout; `decode_layout` gives back an equal one."""
    return _FORMAT.pack(
        [(slab.slab_id, slab.device, slab.nbytes) for slab in layout.slabs],
        [
            (t.name, t.dtype, t.shape, t.nbytes, t.slab, t.offset_bytes, t.crc32, digest_bytes(t.digest))
            for t in layout.tensors
        ],
    )


def decode_layout(data: bytes) -> Layout:
    """Parse and check a layout; raises ProtocolError that names the slab or tensor at fault.

    Checked: bounds, alignment, sizes against dtype and shape, names sorted and unique, and that two
    tensors share bytes only if they are aliases (same place, same size, same digest).
    """
    slabs, tensors = _FORMAT.unpack(
        data,
        LAYOUT_LIMIT_BYTES,
        max_str_len=MAX_NAME_CHARS * 4,
        max_bin_len=SHA256_BYTES,
        max_array_len=min(len(data), MAX_TENSORS),
    )
    if len(slabs) > MAX_SLABS:
        raise ProtocolError(f"layout table lists {len(slabs)} slabs, at most {MAX_SLABS} are allowed")
    layout = Layout(_decode_slabs(slabs), _decode_tensors(tensors, slabs))
    _check_places(layout.tensors)
    return layout


def _decode_slabs(rows: Sequence[object]) -> tuple[SlabEntry, ...]:
    entries: list[SlabEntry] = []
    seen: set[str] = set()
    for index, row in enumerate(rows):
        match row:
            case (str(slab_id), str(device), int(nbytes)) if type(nbytes) is int:
                pass
            case _:
                raise ProtocolError(f"slab {index} of the layout table is not (id, device, bytes)")
        if not _SLAB_ID.fullmatch(slab_id) or not _SLAB_ID.fullmatch(device):
            raise ProtocolError(f"slab {index} has an invalid id {slab_id!r} or device {device!r}")
        if slab_id in seen:
            raise ProtocolError(f"slab {slab_id} is listed twice")
        if not 0 < nbytes <= MAX_TENSOR_BYTES:
            raise ProtocolError(f"slab {slab_id} claims {nbytes} bytes")
        seen.add(slab_id)
        entries.append(SlabEntry(SlabId(slab_id), DeviceId(device), nbytes))
    return tuple(entries)


def _decode_tensors(rows: Sequence[object], slabs: Sequence[object]) -> tuple[TensorEntry, ...]:
    slab_bytes = [slab[2] for slab in slabs]  # type: ignore[index]
    entries: list[TensorEntry] = []
    previous = ""
    for index, row in enumerate(rows):
        entry = _decode_tensor(index, row)
        if entry.name <= previous:
            raise ProtocolError(f"tensor {entry.name!r} is out of order or listed twice")
        previous = entry.name
        if entry.nbytes == 0:
            if entry.slab or entry.offset_bytes:
                raise ProtocolError(f"empty tensor {entry.name!r} does not lie at offset 0 of slab 0")
        elif entry.slab >= len(slab_bytes):
            raise ProtocolError(f"tensor {entry.name!r} lies in slab {entry.slab} of {len(slab_bytes)}")
        elif entry.offset_bytes + entry.nbytes > slab_bytes[entry.slab]:
            raise ProtocolError(
                f"tensor {entry.name!r} ends at {entry.offset_bytes + entry.nbytes}, "
                f"slab {entry.slab} at {slab_bytes[entry.slab]}"
            )
        entries.append(entry)
    return tuple(entries)


def _decode_tensor(index: int, row: object) -> TensorEntry:
    match row:
        case (
            str(name),
            str(dtype),
            tuple(shape),
            int(nbytes),
            int(slab),
            int(offset),
            int(crc32),
            bytes(raw),
        ):
            pass
        case _:
            raise ProtocolError(f"tensor {index} of the layout table is malformed")
    if not type(nbytes) is type(slab) is type(offset) is type(crc32) is int:
        raise ProtocolError(f"tensor {name!r} has a boolean where a number belongs")
    if not name or len(name) > MAX_NAME_CHARS:
        raise ProtocolError(f"tensor {index} has a name of {len(name)} characters")
    if len(shape) > MAX_RANK or len(raw) != SHA256_BYTES or not 0 <= crc32 < 1 << 32:
        raise ProtocolError(f"tensor {name!r} has a malformed shape, digest or CRC32")
    if slab < 0 or offset < 0 or offset % ALIGNMENT_BYTES:
        raise ProtocolError(
            f"tensor {name!r} lies at {offset} of slab {slab}, not at a multiple of {ALIGNMENT_BYTES}"
        )
    try:
        expected = tensor_nbytes(dtype, shape)
    except ValueError as error:
        raise ProtocolError(f"tensor {name!r}: {error}") from error
    if nbytes != expected:
        raise ProtocolError(f"tensor {name!r} claims {nbytes} bytes, dtype and shape give {expected}")
    return TensorEntry(name, dtype, shape, nbytes, slab, offset, crc32, digest_of(raw))


def _check_places(tensors: Sequence[TensorEntry]) -> None:
    placed = sorted((t for t in tensors if t.nbytes), key=lambda t: (t.slab, t.offset_bytes, t.nbytes))
    for before, after in pairwise(placed):
        if before.slab != after.slab or before.offset_bytes + before.nbytes <= after.offset_bytes:
            continue
        if (before.offset_bytes, before.nbytes) != (after.offset_bytes, after.nbytes):
            raise ProtocolError(f"tensors {before.name!r} and {after.name!r} overlap in slab {after.slab}")
        if (before.digest, before.crc32) != (after.digest, after.crc32):
            raise ProtocolError(
                f"tensors {before.name!r} and {after.name!r} share a place in slab {after.slab} "
                "but not a digest"
            )
