"""Digests against the vectors of docs/seal-format.md, and what a version digest covers."""

from __future__ import annotations

import hashlib
import re
import struct
import zlib
from pathlib import Path

import pytest

from shared import digest as module
from shared._native import crc32, crc32_combine, sha256_leaves
from shared.digest import (
    LEAF_BYTES,
    digest_bytes,
    digest_of,
    file_digest,
    leaf_count,
    tensor_digest,
    version_digest,
)
from shared.errors import InvariantError
from shared.ids import Digest

PAGE = (Path(__file__).parents[2] / "docs" / "seal-format.md").read_text(encoding="utf-8")

CONTENTS = {
    "none": b"",
    "`abc`": b"abc",
    "262,144 zero bytes": bytes(LEAF_BYTES),
    "262,145 zero bytes": bytes(LEAF_BYTES + 1),
    "`i mod 251` for `i` in 0…1,000,000 (1,000,001 bytes)": bytes(i % 251 for i in range(1_000_001)),
    "`i mod 251` for `i` in 0…4,999,999 (5,000,000 bytes: 20 leaves)": bytes(
        i % 251 for i in range(5_000_000)
    ),
}


def content_digest(data: bytes) -> Digest:
    return tensor_digest(sha256_leaves(data, LEAF_BYTES))


VERSIONS = {
    "no tensor, no asset": ([], {}),
    "`w`: F32, shape (1), bytes `abcd`; `config.json` = `{}`": (
        [("w", "F32", (1,), content_digest(b"abcd"))],
        {"config.json": file_digest(b"{}")},
    ),
    "`a`: I64 (0, 7) empty; `b`: U8 (3) `abc`; `é`: BF16 () `xy`; `config.json` = `{}`; `vocab.txt` empty": (
        [
            ("é", "BF16", (), content_digest(b"xy")),
            ("b", "U8", (3,), content_digest(b"abc")),
            ("a", "I64", (0, 7), content_digest(b"")),
        ],
        {"vocab.txt": file_digest(b""), "config.json": file_digest(b"{}")},
    ),
}


def test_the_page_has_exactly_these_vectors() -> None:
    rows = re.findall(r"^\| (.+?) \| (?:`[0-9a-f]{8}` \| )?`[0-9a-f]{64}` \|$", PAGE, re.MULTILINE)
    assert rows == [*CONTENTS, *VERSIONS]


@pytest.mark.parametrize("label", CONTENTS)
def test_tensor_vectors(label: str) -> None:
    data = CONTENTS[label]
    assert f"| {label} | `{crc32(data):08x}` | `{content_digest(data)[7:]}` |" in PAGE


@pytest.mark.parametrize("label", VERSIONS)
def test_version_vectors(label: str) -> None:
    tensors, assets = VERSIONS[label]
    assert f"| {label} | `{version_digest(tensors, assets)[7:]}` |" in PAGE


def test_the_page_and_the_code_agree_on_the_format() -> None:
    # Written out once more, by the table of the page.
    def text(value: str) -> bytes:
        return struct.pack("<I", len(value.encode())) + value.encode()

    expected = hashlib.sha256(
        b"changeover version digest\0"
        + struct.pack("<IQQ", 1, 262144, 1)
        + text("w") + text("F32") + struct.pack("<IQ", 1, 1)
        + hashlib.sha256(hashlib.sha256(b"abcd").digest()).digest()
        + struct.pack("<Q", 1) + text("config.json") + hashlib.sha256(b"{}").digest()
    ).hexdigest()  # fmt: skip
    tensors, assets = list(VERSIONS.values())[1]
    assert version_digest(tensors, assets) == f"sha256:{expected}"


def test_leaves_are_cut_at_the_tensor_not_the_file() -> None:
    data = bytes(i % 7 for i in range(2 * LEAF_BYTES + 5))
    cut = [data[:LEAF_BYTES], data[LEAF_BYTES : 2 * LEAF_BYTES], data[2 * LEAF_BYTES :]]
    assert sha256_leaves(data, LEAF_BYTES) == b"".join(hashlib.sha256(leaf).digest() for leaf in cut)
    assert [leaf_count(n) for n in (0, 1, LEAF_BYTES, LEAF_BYTES + 1)] == [0, 1, 1, 2]


def test_crc32_is_zlibs_and_pieces_combine() -> None:
    first, second = b"a" * 1000, b"b" * 77
    assert crc32(first + second) == zlib.crc32(first + second)
    assert crc32_combine(crc32(first), crc32(second), len(second)) == crc32(first + second)
    assert crc32(second, crc32(first)) == crc32(first + second)


BASE = [("w", "F32", (2, 3), content_digest(b"1")), ("x", "F32", (1,), content_digest(b"2"))]
ASSETS = {"config.json": file_digest(b"{}")}


@pytest.mark.parametrize(
    ("tensors", "assets"),
    [
        pytest.param([("v", *BASE[0][1:]), BASE[1]], ASSETS, id="name"),
        pytest.param([("w", "I32", *BASE[0][2:]), BASE[1]], ASSETS, id="dtype"),
        pytest.param([("w", "F32", (3, 2), BASE[0][3]), BASE[1]], ASSETS, id="shape"),
        pytest.param([("w", "F32", (2, 3, 1), BASE[0][3]), BASE[1]], ASSETS, id="rank"),
        pytest.param([(*BASE[0][:3], content_digest(b"3")), BASE[1]], ASSETS, id="bytes"),
        pytest.param([(*BASE[0][:3], BASE[1][3]), (*BASE[1][:3], BASE[0][3])], ASSETS, id="swapped bytes"),
        pytest.param(BASE[:1], ASSETS, id="missing tensor"),
        pytest.param(BASE, {"config.json": file_digest(b"{ }")}, id="config"),
        pytest.param(BASE, {**ASSETS, "tokenizer.json": file_digest(b"")}, id="another asset"),
        pytest.param(BASE, {"config.jsom": ASSETS["config.json"]}, id="asset name"),
    ],
)
def test_every_part_of_a_version_changes_its_digest(
    tensors: list[tuple[str, str, tuple[int, ...], Digest]], assets: dict[str, Digest]
) -> None:
    assert version_digest(tensors, assets) != version_digest(BASE, ASSETS)


def test_order_does_not_change_a_version_digest() -> None:
    assert version_digest(reversed(BASE), ASSETS) == version_digest(BASE, ASSETS)


def test_misuse_is_refused() -> None:
    with pytest.raises(InvariantError, match="comes twice"):
        version_digest([BASE[0], BASE[0]], {})
    with pytest.raises(InvariantError, match="32 bytes"):
        digest_of(b"short")
    with pytest.raises(InvariantError, match="32 bytes each"):
        tensor_digest(b"x" * 33)
    assert digest_bytes(digest_of(b"x" * 32)) == b"x" * 32


def test_the_leaf_size_is_frozen() -> None:
    assert module.LEAF_BYTES == 262_144
