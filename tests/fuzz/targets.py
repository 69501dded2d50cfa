"""What is fuzzed: each parser, good documents to begin with, and what must hold where it accepts."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import safetensors

from loaderd.checkpoint import header as header_module
from loaderd.checkpoint import index as index_module
from loaderd.checkpoint.header import PREFIX_BYTES
from loaderd.seal import document as seal_module
from loaderd.seal.document import SealedFile, SealedTensor, encode_seal, make_seal
from loaderd.signature import bundle as bundle_module
from loaderd.signature import statement as statement_module
from loaderd.signature.bundle import Envelope, encode_bundle
from loaderd.signature.statement import Statement, encode_statement
from shared._native import crc32, sha256_leaves
from shared.digest import LEAF_BYTES, file_digest, tensor_digest
from shared.errors import CheckpointError, SignatureRefused
from shared.memory.dtypes import DTYPE_BITS
from shared.tensor_size import tensor_nbytes
from tests.fuzz.mutation import mutate_json, mutate_safetensors

CORPUS = 48
"""Good documents of each target."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parser under test.

    `check` returns whether the parser accepts, and raises for anything else than the typed error and
    for what should not have been accepted, or not so.  Parsers are looked up when it is called.
    """

    name: str
    share: float  # of all cases
    make: Callable[[Random], bytes]
    check: Callable[[bytes], bool]
    least_accepted: float  # of its cases: below, the fuzzer would no longer reach what it is for


def _refuses(
    parse: Callable[[], object], raw: bytes, typed: type[CheckpointError] = CheckpointError
) -> tuple[object | None, bool]:
    """What a parser returns, or that it refuses, with an error that can be shown and points into the file."""
    try:
        return parse(), False
    except typed as error:
        if not -1 <= error.byte <= len(raw):
            raise AssertionError(f"points to byte {error.byte} of {len(raw)}") from error
        error.message.encode("utf-8")
        return None, True


def _agree(ours: object, theirs: object) -> None:
    if ours != theirs:
        raise AssertionError(f"read as {ours!r}, a plain reader has {theirs!r}")


# --- safetensors headers -------------------------------------------------------------------------


def _good_headers() -> list[tuple[dict[str, Any], bytes]]:
    random = Random(1)
    good = []
    for number in range(CORPUS):
        header: dict[str, Any] = {} if number % 3 else {"__metadata__": {"format": "pt"}}
        begin = 0
        for index in range(random.randrange(1, 5)):
            dtype = random.choice(sorted(DTYPE_BITS))
            shape = [random.randrange(4) for _ in range(random.randrange(3))]
            if DTYPE_BITS[dtype] < 8:
                shape.append(4)
            end = begin + tensor_nbytes(dtype, shape)
            header[f"w.{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            begin = end
        good.append((header, random.randbytes(begin)))
    return good


_HEADERS = _good_headers()


def _make_header(random: Random) -> bytes:
    return mutate_safetensors(*random.choice(_HEADERS), random)


def _check_header(raw: bytes) -> bool:
    def parse() -> object:
        length = header_module.header_length(raw[:PREFIX_BYTES], file="f", file_bytes=len(raw))
        return header_module.parse_header(raw[PREFIX_BYTES:][:length], file="f", file_bytes=len(raw))

    found, is_refused = _refuses(parse, raw)
    if is_refused:
        return False
    assert isinstance(found, tuple)
    ours = {t.name: (t.dtype, list(t.shape), raw[t.file_offset :][: t.nbytes]) for t in found}
    # The reference reader: what is accepted here it accepts as well, and reads the same.
    theirs = {name: (i["dtype"], i["shape"], bytes(i["data"])) for name, i in safetensors.deserialize(raw)}
    _agree(ours, theirs)
    _agree(len(ours), len(found))
    return True


# --- index ---------------------------------------------------------------------------------------

_INDEXES = [
    {
        "metadata": {"total_size": number},
        "weight_map": {f"w.{i}": f"{'ab'[i % 2]}.safetensors" for i in range(1 + number % 5)},
    }
    for number in range(CORPUS)
]


def _make_index(random: Random) -> bytes:
    return mutate_json(random.choice(_INDEXES), random)


def _check_index(raw: bytes) -> bool:
    found, is_refused = _refuses(lambda: index_module.parse_index(raw), raw)
    if is_refused:
        return False
    assert isinstance(found, dict)
    _agree(found, json.loads(raw)["weight_map"])
    for shard in found.values():
        if "/" in shard or not shard.endswith(".safetensors"):
            raise AssertionError(f"would open {shard!r}")
    return True


# --- seals ---------------------------------------------------------------------------------------


def _good_seals() -> list[dict[str, Any]]:
    random = Random(2)
    good = []
    for number in range(CORPUS):
        data = [random.randbytes(random.choice((0, 3, 4, 64, LEAF_BYTES + 1))) for _ in range(1 + number % 4)]
        files = {
            "config.json": SealedFile(2, file_digest(b"{}")),
            "a.safetensors": SealedFile(9, file_digest(b"a")),
        }
        tensors = {}
        for index, content in enumerate(data):
            leaves = sha256_leaves(content, LEAF_BYTES)
            tensors[f"w.{index}"] = SealedTensor(
                "a.safetensors",
                "U8",
                (len(content),),
                len(content),
                tensor_digest(leaves),
                crc32(content),
                leaves,
            )
        good.append(json.loads(encode_seal(make_seal(files, tensors))))
    return good


_SEALS = _good_seals()


def _make_seal(random: Random) -> bytes:
    return mutate_json(random.choice(_SEALS), random)


def _check_seal(raw: bytes) -> bool:
    found, is_refused = _refuses(lambda: seal_module.read_seal(raw), raw)
    if is_refused:
        return False
    assert isinstance(found, seal_module.Seal)
    text = encode_seal(found)
    _agree(json.loads(text), json.loads(raw))
    _agree(seal_module.read_seal(text), found)
    _agree({t.file for t in found.tensors.values()}, {f for f in found.files if f.endswith(".safetensors")})
    return True


# --- signatures ----------------------------------------------------------------------------------

_STATEMENTS = [
    json.loads(
        encode_statement(
            Statement(
                f"m-v{number}",
                {name: file_digest(name.encode()) for name in ("a", "b/c", "é", "b.d/e/f")[: 1 + number % 4]},
                follows_symlinks=number % 2 == 0,
            )
        )
    )
    for number in range(CORPUS)
]
_BUNDLES = [
    json.loads(encode_bundle(Envelope(json.dumps(statement).encode()[:300], b"0" * 70, "ab" * 32)))
    for statement in _STATEMENTS
]


def _make_statement(random: Random) -> bytes:
    return mutate_json(random.choice(_STATEMENTS), random)


def _check_statement(raw: bytes) -> bool:
    found, is_refused = _refuses(lambda: statement_module.read_statement(raw), raw, SignatureRefused)
    if is_refused:
        return False
    assert isinstance(found, Statement)
    plain = json.loads(raw)["predicate"]
    listed = [(entry["name"], "sha256:" + entry["digest"]) for entry in plain["resources"]]
    _agree(list(found.files.items()), listed)
    _agree(found.ignored >= set(plain["serialization"].get("ignore_paths", ())), True)
    for path in found.files:
        if path.startswith("/") or ".." in path.split("/"):
            raise AssertionError(f"would open {path!r}")
    return True


def _make_bundle(random: Random) -> bytes:
    return mutate_json(random.choice(_BUNDLES), random)


def _check_bundle(raw: bytes) -> bool:
    found, is_refused = _refuses(lambda: bundle_module.read_bundle(raw), raw, SignatureRefused)
    if is_refused:
        return False
    assert isinstance(found, Envelope)
    plain = json.loads(raw)["dsseEnvelope"]
    _agree(found.payload, base64.b64decode(plain["payload"]))
    _agree(found.signature, base64.b64decode(plain["signatures"][0]["sig"]))
    return True


TARGETS = {
    target.name: target
    for target in (
        Target("header", 0.5, _make_header, _check_header, 0.05),
        Target("index", 0.1, _make_index, _check_index, 0.05),
        Target("seal", 0.2, _make_seal, _check_seal, 0.05),
        Target("statement", 0.1, _make_statement, _check_statement, 0.05),
        Target("bundle", 0.1, _make_bundle, _check_bundle, 0.05),
    )
}
