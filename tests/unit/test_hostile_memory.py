"""What text that anybody may have written costs to refuse or to read: memory in proportion to its size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loaderd.checkpoint.checkpoint import CONFIG_LIMIT_BYTES, parse_config
from loaderd.seal.document import SealedFile, SealedTensor, encode_seal, make_seal
from loaderd.signature.bundle import (
    MEDIA_TYPE,
    PAYLOAD_TYPE,
    SIGNATURE_LIMIT_BYTES,
    Envelope,
    encode_bundle,
    read_bundle,
)
from loaderd.signature.statement import MAX_RESOURCES, Statement, encode_statement, read_statement
from shared.digest import LEAF_BYTES, SHA256_BYTES, file_digest, tensor_digest
from shared.errors import CheckpointError

_PROGRAM = """
import importlib, sys
from pathlib import Path
def peak():  # of this program alone; getrusage also counts who started it
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
module, name = sys.argv[1].split(":")
read = getattr(importlib.import_module(module), name)
raw = Path(sys.argv[2]).read_bytes()
before = peak()
try:
    read(raw)
    said = "read"
except Exception as error:
    said = str(error)
print(peak() - before, said[:200])
"""
SEAL_BYTES = 96 << 20
CONFIG = "loaderd.checkpoint.checkpoint:parse_config"
BUNDLE = "loaderd.signature.bundle:read_bundle"
SEAL = "loaderd.seal.document:read_seal"


def cost(tmp_path: Path, reader: str, raw: bytes) -> tuple[int, str]:
    """Bytes of memory that `reader` takes at most beside `raw`, in a process of its own, and what it says."""
    path = tmp_path / "hostile"
    path.write_bytes(raw)
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, reader, str(path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    nbytes, _, said = done.stdout.partition(" ")
    return int(nbytes), said.strip()


def filled(limit_bytes: int, before: str, unit: str, after: str) -> bytes:
    """`unit` as often as fits into the limit between `before` and `after`."""
    head, each, tail = before.encode(), unit.encode(), after.encode()
    return head + each * ((limit_bytes - len(head) - len(tail)) // len(each)) + tail


def in_bundle(payload: str) -> str:
    """A bundle that is none only for its payload, which is cut open there."""
    envelope = {"payloadType": PAYLOAD_TYPE, "signatures": [{"sig": "AAAA"}]}
    text = json.dumps(
        {"mediaType": MEDIA_TYPE, "verificationMaterial": {"publicKey": {}}, "dsseEnvelope": envelope}
    )
    return text.replace('"payloadType"', f'"payload": {payload}, "payloadType"')


@pytest.mark.parametrize(
    ("unit", "payload"),
    [
        ('{"ab":"c"},', "[{unit}0]"),
        ("0,", "[{unit}0]"),
        ('"a",', "[{unit}0]"),
        ("AAAA", '"{unit}"'),
        ("AAAA", '"{unit}\U0001f600"'),
        ("AAAA", '"{unit}\\ud83d\\ude00"'),
    ],
    ids=["objects", "numbers", "texts", "one text", "one wide text", "one text with a wide escape"],
)
def test_a_signature_that_is_none(tmp_path: Path, unit: str, payload: str) -> None:
    before, after = in_bundle(payload).split("{unit}")
    taken, said = cost(tmp_path, BUNDLE, filled(SIGNATURE_LIMIT_BYTES, before, unit, after))
    if payload.startswith("["):
        assert said == "model.sig: byte 0: JSON has more structure than 64 entries could need"
        assert taken < 8 << 20
    else:
        assert taken < 256 << 20


def sealed(nbytes: int, count: int) -> bytes:
    """A seal of `count` tensors whose leaves take `nbytes` of text."""
    leaves = bytes(range(256)) * (nbytes // 2 // count // 256)
    size = len(leaves) // SHA256_BYTES * LEAF_BYTES
    tensor = SealedTensor("model.safetensors", "U8", (size,), size, tensor_digest(leaves), 7, leaves)
    return encode_seal(
        make_seal(
            {name: SealedFile(2, file_digest(b"{}")) for name in ("config.json", "model.safetensors")},
            {f"w.{index}": tensor for index in range(count)},
        )
    )


@pytest.mark.parametrize("count", [1, 10_000])
def test_a_seal_that_is_right(tmp_path: Path, count: int) -> None:
    """What is kept is half as long as its text, and the text is never held twice."""
    raw = sealed(SEAL_BYTES, count)
    taken, said = cost(tmp_path, SEAL, raw)
    assert said == "read"
    assert taken < len(raw)


@pytest.mark.parametrize(
    ("before", "unit", "after", "reason"),
    [
        ('{"leaves":"', "ab", '"}', "lacks 'format'"),
        ('{"leaves":"', "AB", '"}', "lacks 'format'"),
        ('{"leaves":"', "AB", '","b":"\U0001f600"}', "bytes beside the leaves"),
        ("{", '"leaves":"",', '"a":0}', "has leaves of more than 500000 tensors"),
        ('{"leaves":[', '"leaves":"ab",', '"a":0}', "has leaves of more than 500000 tensors"),
        ('{"a":[', '{"b":0},', "0]}", "more structure"),
    ],
    ids=["hex", "no hex", "wide", "empty leaves", "leaves", "objects"],
)
def test_a_seal_that_is_none(tmp_path: Path, before: str, unit: str, after: str, reason: str) -> None:
    taken, said = cost(tmp_path, SEAL, filled(SEAL_BYTES, before, unit, after))
    assert reason in said
    assert taken < 2.25 * SEAL_BYTES


@pytest.mark.parametrize("unit", ['{"ab":"c"},', "0,", '"a",'], ids=["objects", "numbers", "texts"])
def test_a_config_that_is_none(tmp_path: Path, unit: str) -> None:
    taken, said = cost(tmp_path, CONFIG, filled(CONFIG_LIMIT_BYTES, '{"a":[', unit, "0]}"))
    assert said == "config.json: byte 0: JSON has more structure than 65536 entries could need"
    assert taken < 8 << 20


def test_a_config_that_is_too_large() -> None:
    assert parse_config(filled(CONFIG_LIMIT_BYTES, '{"a":"', "b", '"}'))["a"]
    with pytest.raises(CheckpointError, match=rf"{CONFIG_LIMIT_BYTES} are allowed"):
        parse_config(filled(CONFIG_LIMIT_BYTES + 1, '{"a":"', "b", '"}'))


def test_a_signature_over_as_many_files_as_are_allowed() -> None:
    files = {f"{index:0>75}": file_digest(b"") for index in range(MAX_RESOURCES)}
    text = json.dumps(json.loads(encode_statement(Statement("m", files))))  # with spaces, as others write it
    raw = encode_bundle(Envelope(text.encode(), b"sig", None))
    assert read_statement(read_bundle(raw).payload).files == files
