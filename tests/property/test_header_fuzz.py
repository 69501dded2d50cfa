"""The header parser against the reference reader: what it accepts, safetensors reads the same way."""

from __future__ import annotations

import json
import struct

import safetensors
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from loaderd.checkpoint.header import PREFIX_BYTES, TensorSource, header_length, parse_header
from shared.errors import CheckpointError
from shared.memory.dtypes import DTYPE_BITS
from shared.tensor_size import tensor_nbytes
from tests.unit.checkpoint_files import Tensor, pack
from tests.unit.checkpoint_files import safetensors as build

FUZZ = settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])

dtypes = st.sampled_from(sorted(DTYPE_BITS))
names = st.text(min_size=1, max_size=6) | st.sampled_from(["a", "b", "__metadata__", "model.w", "é", ""])
dimensions = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """Well-formed tensors, names aside."""
    result: dict[str, Tensor] = {}
    for name in draw(st.lists(names, max_size=5, unique=True)):
        dtype, shape = draw(dtypes), draw(dimensions)
        if DTYPE_BITS[dtype] < 8:
            shape = [*shape, 4]
        nbytes = tensor_nbytes(dtype, shape)
        result[name] = (dtype, shape, draw(st.binary(min_size=nbytes, max_size=nbytes)))
    return result


scalars = st.none() | st.booleans() | st.integers(-2, 1 << 65) | st.floats() | st.text(max_size=3) | dtypes
entries = st.fixed_dictionaries(
    {
        "dtype": dtypes | scalars,
        "shape": dimensions | st.lists(scalars, max_size=2) | scalars,
        "data_offsets": st.lists(st.integers(0, 40), min_size=2, max_size=2) | st.lists(scalars, max_size=3),
    },
    optional={"extra": scalars},
)
documents = st.dictionaries(
    names,
    entries
    | scalars
    | st.lists(scalars, max_size=3)
    | st.dictionaries(names, st.text(max_size=3), max_size=2),
    max_size=3,
)


def parse(raw: bytes) -> tuple[TensorSource, ...] | None:
    """What the parser says; None if it refuses.  Any other error fails the test."""
    try:
        length = header_length(raw[:PREFIX_BYTES], file="f", file_bytes=len(raw))
        return parse_header(raw[PREFIX_BYTES:][:length], file="f", file_bytes=len(raw))
    except CheckpointError as error:
        refusal = error
    assert -1 <= refusal.byte <= len(raw)
    refusal.message.encode()
    return None


def check(raw: bytes) -> bool:
    """If the parser accepts, the reference does, with the same names, dtypes, shapes and bytes."""
    found = parse(raw)
    if found is None:
        return False
    expected = {
        name: (info["dtype"], info["shape"], info["data"]) for name, info in safetensors.deserialize(raw)
    }
    ours = {t.name: (t.dtype, list(t.shape), raw[t.file_offset :][: t.nbytes]) for t in found}
    assert ours == expected
    assert len(ours) == len(found)
    return True


@FUZZ
@given(tensors(), st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2))
def test_what_is_well_formed_is_accepted_unless_its_names_are_not(
    content: dict[str, Tensor], metadata: dict[str, str] | None
) -> None:
    raw = build(content, metadata)
    is_plain = all(name.isprintable() and name and name != "__metadata__" for name in content)
    assert check(raw) or not is_plain


@FUZZ
@given(documents, st.binary(max_size=40), st.sampled_from(["", " ", "\n", "}"]))
@example({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, b"x", "")
@example({"a": {"dtype": "U8", "shape": [0, 1 << 62], "data_offsets": [0, 0]}}, b"", "")
def test_structured_garbage(document: dict[str, object], data: bytes, tail: str) -> None:
    check(pack(json.dumps(document) + tail, data))


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A well-formed file with a few bytes replaced, inserted or removed."""
    raw = bytearray(build(draw(tensors())))
    keep_length = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(len(raw) - 1, 0)))
        patch = draw(
            st.binary(max_size=2)
            | st.sampled_from([b"0", b"-", b"1", b'"', b"{", b"}", b",", b" ", b"\\u0061"])
        )
        raw[at : at + draw(st.integers(0, 2))] = patch
    if not keep_length and len(raw) >= PREFIX_BYTES:
        end = raw.rfind(b"}") + 1
        raw[:PREFIX_BYTES] = struct.pack("<Q", max(end - PREFIX_BYTES, 0))
    return bytes(raw)


@settings(FUZZ, max_examples=1500)
@given(mutated())
def test_mutated_files(raw: bytes) -> None:
    check(raw)


@FUZZ
@given(st.binary(max_size=60))
def test_noise(raw: bytes) -> None:
    check(raw)


@FUZZ
@given(st.binary(max_size=24), st.integers(0, (1 << 64) - 1) | st.integers(0, 30))
def test_any_length_prefix(raw: bytes, length: int) -> None:
    check(pack(b"{" + raw + b"}", length=length))
