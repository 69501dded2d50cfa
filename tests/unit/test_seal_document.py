"""`seal.json` as text: what is written is read back, what contradicts itself is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from loaderd.seal.document import SealedFile, SealedTensor, encode_seal, make_seal, read_seal
from shared._native import sha256_leaves
from shared.digest import LEAF_BYTES, file_digest, tensor_digest
from shared.errors import CheckpointError
from tests.unit.checkpoint_files import content

FILE = "model.safetensors"


def sealed(data: bytes, shape: tuple[int, ...]) -> SealedTensor:
    leaves = sha256_leaves(data, LEAF_BYTES)
    return SealedTensor(FILE, "U8", shape, len(data), tensor_digest(leaves), 0xABC, leaves)


LONG = content(1, LEAF_BYTES + 100)
SEAL = make_seal(
    {FILE: SealedFile(1000, file_digest(b"f")), "config.json": SealedFile(2, file_digest(b"{}"))},
    {"long": sealed(LONG, (len(LONG),)), "é": sealed(b"abc", (3,)), "empty": sealed(b"", (0, 9))},
)


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(encode_seal(SEAL))
    edit(document)
    return json.dumps(document).encode()


def test_a_seal_survives_its_text() -> None:
    raw = encode_seal(SEAL)
    assert read_seal(raw) == SEAL
    assert encode_seal(read_seal(raw)) == raw
    assert SEAL.asset_digests == {"config.json": file_digest(b"{}")}
    assert SEAL.tensor_digests["empty"] == file_digest(b"")
    assert SEAL.tensors["long"].leaves[:32] != SEAL.tensors["long"].leaves[32:]


def swap_leaves(document: dict[str, Any]) -> None:
    tensor = document["tensors"]["long"]
    tensor["leaves"] = tensor["leaves"][64:] + tensor["leaves"][:64]


def move(document: dict[str, Any], file: str) -> None:
    document["tensors"]["é"]["file"] = file


def set_tensor(field: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["tensors"]["long"].update({field: value})


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "format": (lambda d: d.update(format="other"), "is 'other' version 1"),
    "version": (lambda d: d.update(version=2), "version 2, this build reads"),
    "boolean version": (lambda d: d.update(version=True), "version True"),
    "leaf size": (lambda d: d.update(leaf_bytes=65536), "leaves of 65536 bytes, format 1 has 262144"),
    "unknown field": (lambda d: d.update(note=""), "the seal has an unknown field 'note'"),
    "missing field": (lambda d: d.pop("digest"), "the seal lacks 'digest'"),
    "files": (lambda d: d.update(files=[]), "not an object"),
    "no tensors": (lambda d: d.update(tensors={}), "lists 0 tensors"),
    "no config": (lambda d: d["files"].pop("config.json"), "does not list config.json"),
    "code": (lambda d: d["files"].update({"x.py": d["files"][FILE]}), "'x.py', which is no part"),
    "path": (lambda d: d["files"].update({"../a.safetensors": d["files"][FILE]}), "which is no part"),
    "size": (lambda d: d["files"][FILE].update(size=-1), "has size -1"),
    "size type": (lambda d: d["files"][FILE].update(size="1"), "has size '1'"),
    "file digest": (lambda d: d["files"][FILE].update(sha256="sha256:AB"), "expected sha256: and 64 hex"),
    "file field": (lambda d: d["files"][FILE].update(mtime=1), "unknown field 'mtime'"),
    "config digest": (
        lambda d: d["files"]["config.json"].update(sha256=file_digest(b"[]")),
        "contradicts itself: its version digest is",
    ),
    "version digest": (
        lambda d: d.update(digest=file_digest(b"")),
        "contradicts itself: its version digest is",
    ),
    "unlisted file": (lambda d: move(d, "b.safetensors"), "places tensors in 'b.safetensors'"),
    "tensor in config": (lambda d: move(d, "config.json"), "places tensors in 'config.json'"),
    "unused file": (
        lambda d: d["files"].update({"b.safetensors": d["files"][FILE]}),
        "which holds no tensor",
    ),
    "tensor name": (lambda d: d["tensors"].update({"n" * 1025: d["tensors"]["é"]}), "1025 characters"),
    "tensor type": (lambda d: d["tensors"].update({"long": []}), "tensor 'long' is not an object"),
    "dtype": (set_tensor("dtype", "U9"), "dtype 'U9' is not known"),
    "shape type": (set_tensor("shape", {}), "another type"),
    "shape": (set_tensor("shape", [True]), "True is not a non-negative"),
    "crc32": (set_tensor("crc32", "ABCDEF01"), "not 8 hex digits"),
    "hex": (set_tensor("leaves", "zz"), "leaves are not hex"),
    "half a byte": (set_tensor("leaves", "abc"), "leaves are not hex"),
    "capitals": (set_tensor("leaves", "AB" * 64), "leaves are not hex"),
    "leaf count": (set_tensor("leaves", "00" * 32), "32 bytes of leaves, 2 leaves are expected"),
    "leaf order": (swap_leaves, "contradicts itself: digest is"),
    "tensor digest": (set_tensor("digest", file_digest(b"")), "contradicts itself: digest is"),
    "renamed": (lambda d: d["tensors"].update(z=d["tensors"].pop("é")), "its version digest is"),
    "retyped": (lambda d: d["tensors"]["é"].update(dtype="I8"), "its version digest is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_seal_that_is_wrong_is_refused(case: str) -> None:
    edit, reason = REFUSED[case]
    with pytest.raises(CheckpointError) as caught:
        read_seal(edited(edit))
    assert reason in caught.value.reason
    assert caught.value.file == "seal.json"


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document.update(format="x" * 1_000_000),
        lambda document: document.update(version=["x" * 1_000_000]),
        lambda document: document.update(leaf_bytes="x" * 1_000_000),
        lambda document: document.update(digest="x" * 1_000_000),
        lambda document: document["files"].update({"x" * 1_000_000: {}}),
        lambda document: document["files"][FILE].update(size="x" * 1_000_000),
        lambda document: document["files"][FILE].update({"x" * 1_000_000: 0}),
        set_tensor("file", "x" * 1_000_000),
        set_tensor("dtype", "x" * 1_000_000),
        set_tensor("shape", [10**4000] * 64),
        set_tensor("shape", ["x" * 1_000_000]),
        set_tensor("digest", "x" * 1_000_000),
        set_tensor("crc32", "x" * 1_000_000),
    ],
)
def test_a_refusal_is_short_whatever_the_seal_says(edit: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_seal(edited(edit))
    assert len(caught.value.message) < 1000


def test_aliases_with_different_checksums_are_refused() -> None:
    alias = sealed(b"abc", (3,))
    other = replace(alias, crc32=1)
    files = {FILE: SealedFile(1, file_digest(b"")), "config.json": SealedFile(2, file_digest(b"{}"))}
    assert read_seal(encode_seal(make_seal(files, {"a": alias, "b": alias}))).tensors["b"] == alias
    with pytest.raises(CheckpointError, match="contradicts itself: CRC32 is 00000001") as caught:
        read_seal(encode_seal(make_seal(files, {"a": alias, "b": other})))
    assert caught.value.tensor == "b"


def test_a_refusal_names_the_tensor() -> None:
    with pytest.raises(CheckpointError) as caught:
        read_seal(edited(swap_leaves))
    assert caught.value.tensor == "long"


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"format":"x","format":"y"}', encode_seal(SEAL)[:-3]])
def test_text_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_seal(raw)
    assert caught.value.file == "seal.json"


def test_a_duplicate_tensor_is_refused() -> None:
    raw = encode_seal(SEAL).replace(b'"empty"', b'"long"')
    with pytest.raises(CheckpointError, match="duplicate key 'long'"):
        read_seal(raw)


# --- leaves, which are cut out of the text before it is parsed -----------------------------------


DIGITS = SEAL.tensors["long"].leaves.hex().encode()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"leaves":', b'"leaves" \r\n\t: '),
        (b'"leaves":', rb'"le\u0061ves":'),
        (DIGITS, rb"\u%04x" % DIGITS[0] + DIGITS[1:]),
    ],
)
def test_leaves_are_read_however_they_are_written(old: bytes, new: bytes) -> None:
    raw = encode_seal(SEAL)
    assert old in raw
    assert read_seal(raw.replace(old, new)) == SEAL


@pytest.mark.parametrize("name", ["#0", "leaves", 'x"leaves', "x\\", '"leaves":"ab"', "ab" * 40])
def test_a_tensor_may_have_any_name(name: str) -> None:
    seal = make_seal(SEAL.files, {name: SEAL.tensors["long"]})
    assert read_seal(encode_seal(seal)) == seal


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        # A text that looks like a mark, in place of leaves or beside them.
        (b'"leaves":"%b"', b'"leaves":"#0"', "leaves are not hex"),
        (b'"leaves":"%b"', b'"leaves":"\\u00230"', "leaves are not hex"),
        (b'"leaves":"%b"', b'"leaves":"%b","leaves":"#0"', "duplicate key 'leaves'"),
        (b'"leaves":"%b"', b'"leaves":"%b","leaves":"%b"', "duplicate key 'leaves'"),
        (b'"leaves":"%b"', b'"leaves":"%b","x\\"leaves":"ab"', "unknown field"),
        (b'"leaves":"%b"', b'"leaves":"#0","x":{"leaves":"%b"}', "unknown field 'x'"),
        (b'"leaves":"%b"', b'"leaves":["#0","leaves","%b"]', "leaves are not hex"),
        # No JSON, also where the leaves that are cut are what made it none.
        (b'"leaves":"%b"', b'"leaves":"%b', "not valid JSON"),
        (b'"leaves":"%b"', b'"x"leaves":"%b"', "not valid JSON"),
        (b'"leaves":"%b"', b'"leaves":"%b""ab"', "not valid JSON"),
        (b'"leaves":"%b"', b'"leaves":"a%b"', "leaves are not hex"),
    ],
)
def test_leaves_cannot_be_taken_from_elsewhere(old: bytes, new: bytes, reason: str) -> None:
    digits = SEAL.tensors["long"].leaves.hex().encode()
    raw = encode_seal(SEAL)
    assert raw.count(old.replace(b"%b", digits)) == 1
    with pytest.raises(CheckpointError, match=reason):
        read_seal(raw.replace(old.replace(b"%b", digits), new.replace(b"%b", digits)))


@pytest.mark.parametrize("place", [b'"tensors":{', b'"long":{', b'"leaves":"' + DIGITS + b'"'])
@pytest.mark.parametrize(
    ("fault", "reason", "byte"),
    [(b"\xff", "not UTF-8", 0), (b"?", "not valid JSON", 0), (rb'"\ud800":0,', "lone surrogate", 1)],
)
def test_a_fault_is_told_at_its_byte_in_the_whole_text(
    place: bytes, fault: bytes, reason: str, byte: int
) -> None:
    """Before and after leaves that were cut out."""
    raw = encode_seal(SEAL)
    at = raw.index(place)
    with pytest.raises(CheckpointError, match=reason) as caught:
        read_seal(raw[:at] + fault + raw[at:])
    assert caught.value.byte == at + byte
