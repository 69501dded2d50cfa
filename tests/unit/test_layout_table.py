"""The layout table, asset bundle and sealed memfd: what is sent arrives, what is wrong is refused."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from shared import layout_table
from shared.asset_bundle import decode_assets, encode_assets
from shared.digest import file_digest
from shared.errors import InvariantError, ProtocolError
from shared.ids import DeviceId, SlabId
from shared.layout import Layout, SlabEntry, TensorEntry
from shared.layout_table import decode_layout, encode_layout
from shared.sealed_memfd import read_sealed_memfd, sealed_memfd

A = TensorEntry("a", "F32", (2, 3), 24, 0, 0, 7, file_digest(b"a"))
B = TensorEntry("b", "BF16", (), 2, 1, 256, 0xFFFFFFFF, file_digest(b"b"))
EMPTY = TensorEntry("e", "F32", (0, 4), 0, 0, 0, 0, file_digest(b""))
SLABS = (SlabEntry(SlabId("s-0"), DeviceId("host"), 4096), SlabEntry(SlabId("s-1"), DeviceId("GPU-1-2"), 258))
LAYOUT = Layout(SLABS, (A, B, EMPTY))


def test_a_layout_survives_the_way() -> None:
    assert decode_layout(encode_layout(LAYOUT)) == LAYOUT
    assert decode_layout(encode_layout(Layout((), (EMPTY,)))) == Layout((), (EMPTY,))


def test_aliases_share_a_place_and_count_once() -> None:
    layout = Layout(SLABS, (A, replace(A, name="a2", dtype="I32"), replace(EMPTY, name="z")))
    assert decode_layout(encode_layout(layout)) == layout
    assert layout.total_bytes == 24


REFUSED_TENSORS = {
    "order": ((B, A), "'a' is out of order"),
    "twice": ((A, A), "'a' is out of order or listed twice"),
    "empty name": ((replace(A, name=""),), "name of 0 characters"),
    "alignment": ((replace(A, offset_bytes=128),), "not at a multiple of 256"),
    "negative offset": ((replace(A, offset_bytes=-256),), "not at a multiple of 256"),
    "negative slab": ((replace(A, slab=-1),), "lies at 0 of slab -1"),
    "slab": ((replace(A, slab=2),), "slab 2 of 2"),
    "end": ((replace(A, slab=1, offset_bytes=256),), "ends at 280, slab 1 at 258"),
    "size": ((replace(A, nbytes=25),), "claims 25 bytes, dtype and shape give 24"),
    "dtype": ((replace(A, dtype="F33"),), "dtype 'F33' is not known"),
    "shape": ((replace(A, shape=(-2, -3)),), "-2 is not a non-negative"),
    "rank": ((replace(A, shape=(1,) * 65),), "malformed shape"),
    "crc32": ((replace(A, crc32=1 << 32),), "malformed shape, digest or CRC32"),
    "boolean": ((replace(A, nbytes=True, shape=(1,), dtype="U8"),), "boolean"),
    "empty elsewhere": ((replace(EMPTY, offset_bytes=256),), "empty tensor 'e'"),
    "overlap": (
        (replace(A, shape=(100,), nbytes=400), replace(A, name="b", offset_bytes=256)),
        "'a' and 'b' overlap in slab 0",
    ),
    "same start": ((A, replace(A, name="b", shape=(1,), nbytes=4)), "overlap in slab 0"),
    "other digest": ((A, replace(A, name="b", digest=file_digest(b"?"))), "but not a digest"),
    "other crc32": ((A, replace(A, name="b", crc32=8)), "but not a digest"),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_a_tensor_that_cannot_be_is_refused(case: str) -> None:
    tensors, reason = REFUSED_TENSORS[case]
    with pytest.raises(ProtocolError, match=reason):
        decode_layout(encode_layout(Layout(SLABS, tensors)))


@pytest.mark.parametrize(
    ("slabs", "reason"),
    [
        ((SLABS[0], SLABS[0]), "s-0 is listed twice"),
        ((replace(SLABS[0], nbytes=0),), "claims 0 bytes"),
        ((replace(SLABS[0], nbytes=1 << 60),), "claims"),
        ((replace(SLABS[0], slab_id=SlabId("../x")),), "invalid id"),
        ((replace(SLABS[0], device=DeviceId("")),), "invalid id"),
    ],
)
def test_a_slab_that_cannot_be_is_refused(slabs: tuple[SlabEntry, ...], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode_layout(encode_layout(Layout(slabs, ())))


REFUSED_BYTES = {
    "version": (msgpack.packb(["changeover-layout", 2, [], []]), "version 2, expected"),
    "format": (msgpack.packb(["other", 1, [], []]), "'other' version 1, expected"),
    "fields": (msgpack.packb(["changeover-layout", 1, []]), r"is not \(format"),
    "rows": (msgpack.packb(["changeover-layout", 1, [], {}]), r"is not \(format"),
    "slab row": (msgpack.packb(["changeover-layout", 1, [7], []]), "slab 0 of the layout"),
    "tensor row": (msgpack.packb(["changeover-layout", 1, [], [7]]), "tensor 0 of the layout"),
    "map": (msgpack.packb({}), r"is not \(format"),
    "announced array": (b"\xdd\xff\xff\xff\xff", "is not msgpack"),
    "depth": (b"\x91" * 5000, "is not msgpack"),
    "truncated": (encode_layout(LAYOUT)[:-1], "is not msgpack"),
    "trailing": (encode_layout(LAYOUT) + b"\0", "is not msgpack"),
    "nothing": (b"", "is not msgpack"),
}


@pytest.mark.parametrize("case", REFUSED_BYTES)
def test_bytes_that_are_no_layout_are_refused(case: str) -> None:
    data, reason = REFUSED_BYTES[case]
    with pytest.raises(ProtocolError, match=reason):
        decode_layout(data)


def test_a_table_over_the_limit_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_layout(LAYOUT)
    monkeypatch.setattr(layout_table, "LAYOUT_LIMIT_BYTES", len(data) - 1)
    with pytest.raises(ProtocolError, match="exceeds"):
        decode_layout(data)


def test_more_tensors_than_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_layout(LAYOUT)
    monkeypatch.setattr(layout_table, "MAX_TENSORS", 2)
    with pytest.raises(ProtocolError, match=r"is not msgpack: \d+ exceeds max_array_len"):
        decode_layout(data)


def test_assets_survive_the_way() -> None:
    assets = {"tokenizer.json": b"\x00\xff", "config.json": b"{}"}
    assert decode_assets(encode_assets(assets)) == assets
    assert encode_assets(assets) == encode_assets(dict(reversed(assets.items())))


@pytest.mark.parametrize("name", ["../config.json", "a/b", ".hidden", "", "a\0", "a\n", "x" * 128, "é.json"])
def test_asset_names_are_plain(name: str) -> None:
    with pytest.raises(InvariantError, match="is not an asset name"):
        encode_assets({name: b""})
    with pytest.raises(ProtocolError, match="not a named file"):
        decode_assets(msgpack.packb(["changeover-assets", 1, [[name, b""]]]))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (["changeover-assets", 2, []], "version 2"),
        (["changeover-assets", 1, [["a", b""], ["a", b""]]], "holds 'a' twice"),
        (["changeover-assets", 1, [["a", "text"]]], "not a named file"),
        (["changeover-assets", 1, [["a", b""]] * 65], "is not msgpack"),
        ([], "is not"),
    ],
)
def test_a_bundle_that_cannot_be_is_refused(value: list[object], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode_assets(msgpack.packb(value))


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


@pytest.mark.parametrize("data", [b"", b"x", bytes(1 << 20)])
def test_a_sealed_memfd_survives_the_way(data: bytes) -> None:
    fd = sealed_memfd(data, "table")
    assert read_sealed_memfd(fd, len(data)) == data
    assert not is_open(fd)


@pytest.mark.parametrize("change", [lambda fd: os.pwrite(fd, b"y", 0), lambda fd: os.ftruncate(fd, 0),
                                    lambda fd: os.ftruncate(fd, 9)])  # fmt: skip
def test_a_sealed_memfd_cannot_be_changed(change: Callable[[int], object]) -> None:
    fd = sealed_memfd(b"x", "table")
    with pytest.raises(PermissionError):
        change(fd)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    assert read_sealed_memfd(fd, 1) == b"x"


SEALS = [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL]


@pytest.mark.parametrize("missing", SEALS)
def test_a_memfd_that_lacks_a_seal_is_refused_and_closed(missing: int) -> None:
    fd = os.memfd_create("table", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, sum(SEALS) - missing)
    with pytest.raises(ProtocolError, match="has seals"):
        read_sealed_memfd(fd, 100)
    assert not is_open(fd)


def test_other_files_and_too_many_bytes_are_refused_and_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    with pytest.raises(ProtocolError, match="is not a memfd"):
        read_sealed_memfd(fd, 100)
    assert not is_open(fd)
    fd = sealed_memfd(b"xx", "table")
    with pytest.raises(ProtocolError, match="holds 2 bytes, at most 1"):
        read_sealed_memfd(fd, 1)
    assert not is_open(fd)
