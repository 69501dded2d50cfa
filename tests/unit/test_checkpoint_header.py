"""The header parser: each rule of the format, and each thing refused beyond the reference reader."""

from __future__ import annotations

import re
import struct

import pytest

from loaderd.checkpoint.header import (
    HEADER_LIMIT_BYTES,
    PREFIX_BYTES,
    TensorSource,
    header_length,
    parse_header,
)
from shared.errors import CheckpointError
from shared.memory.dtypes import DTYPE_BITS
from tests.unit.checkpoint_files import pack, safetensors


def parse(raw: bytes) -> tuple[TensorSource, ...]:
    length = header_length(raw[:PREFIX_BYTES], file="f.safetensors", file_bytes=len(raw))
    return parse_header(raw[PREFIX_BYTES:][:length], file="f.safetensors", file_bytes=len(raw))


def refused(raw: bytes) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        parse(raw)
    assert caught.value.file == "f.safetensors"
    return caught.value


def entry(dtype: str = "U8", offsets: str = "[0,2]") -> str:
    return f'{{"dtype":"{dtype}","shape":[2],"data_offsets":{offsets}}}'


def test_tensors_come_in_file_order_with_absolute_offsets() -> None:
    raw = pack(f'{{"b":{entry(offsets="[2,4]")},"a":{entry()}}}', b"1234")
    first, second = parse(raw)
    start = len(raw) - 4
    assert first == TensorSource("a", "U8", (2,), 2, "f.safetensors", start)
    assert second == TensorSource("b", "U8", (2,), 2, "f.safetensors", start + 2)
    assert raw[second.file_offset :] == b"34"


def test_trailing_spaces_and_metadata_are_legal() -> None:
    raw = pack(f'{{"__metadata__":{{"format":"pt"}},"a":{entry()}}}     ', b"12")
    assert [tensor.name for tensor in parse(raw)] == ["a"]


def test_scalar_and_empty_tensors_work() -> None:
    raw = safetensors(
        {"scalar": ("F32", [], b"abcd"), "empty": ("F32", [0, 7], b""), "end": ("I8", [1], b"x")}
    )
    sizes = {tensor.name: (tensor.shape, tensor.nbytes) for tensor in parse(raw)}
    assert sizes == {"scalar": ((), 4), "empty": ((0, 7), 0), "end": ((1,), 1)}


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_every_dtype_has_its_size(dtype: str) -> None:
    nbytes = 8 * DTYPE_BITS[dtype] // 8
    (tensor,) = parse(safetensors({"a": (dtype, [8], bytes(nbytes))}))
    assert tensor.nbytes == nbytes


# `@` stands for a legal entry, `#…#` for one with other fields.
REFUSED = {
    "leading white space": (' {"a":@}', "does not start with '{'"),
    "trailing newline": ('{"a":@}\n', "does not end with '}' and spaces"),
    "array": ("[]", "does not start with '{'"),
    "unfinished": ("{", "does not end"),
    "two values": ('{"a":@}{}', "not valid JSON"),
    "syntax": ('{"a" 1}', "not valid JSON"),
    "control character in JSON": ('{"a\t":@}', "not valid JSON"),
    "depth": ('{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "duplicate": ('{"a":@,"a":@}', "duplicate key 'a'"),
    "duplicate after unescaping": ('{"a":@,"\\u0061":@}', "duplicate key 'a'"),
    "duplicate field": (
        '{"a":{"dtype":"I8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        "duplicate key 'dtype'",
    ),
    "duplicate metadata key": ('{"__metadata__":{"k":"1","k":"2"}}', "duplicate key 'k'"),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', "duplicate key '__metadata__'"),
    "metadata number": ('{"__metadata__":{"k":1}}', "not a string"),
    "metadata array": ('{"__metadata__":[]}', "not an object"),
    "metadata null": ('{"__metadata__":null}', "not an object"),
    "metadata surrogate": ('{"__metadata__":{"k":"\\ud800"}}', "lone surrogate"),
    "entry array": ('{"a":["U8",[2],[0,2]]}', "entry is not an object"),
    "missing field": ('{"a":{"dtype":"U8","shape":[0]}}', "'data_offsets' is missing"),
    "unknown field": ('{"a":{"x":1,"dtype":"U8","shape":[2],"data_offsets":[0,2]}}', "unknown field 'x'"),
    "dtype": ('{"a":#"F33",[2],[0,2]#}', "dtype 'F33' is not known"),
    "dtype case": ('{"a":#"u8",[2],[0,2]#}', "dtype 'u8' is not known"),
    "dtype number": ('{"a":#8,[2],[0,2]#}', "dtype is not a string"),
    "shape boolean": ('{"a":#"U8",[true,2],[0,2]#}', "True is not a non-negative integer"),
    "shape null": ('{"a":#"U8",[null],[0,2]#}', "None is not a non-negative integer"),
    "shape negative": ('{"a":#"U8",[-2],[0,2]#}', "not an unsigned"),
    "shape negative zero": ('{"a":#"U8",[-0],[0,2]#}', "not an unsigned"),
    "shape float": ('{"a":#"U8",[2.0],[0,2]#}', "is not an integer"),
    "shape exponent": ('{"a":#"U8",[1e0,2],[0,2]#}', "is not an integer"),
    "shape NaN": ('{"a":#"U8",[NaN],[0,2]#}', "is not an integer"),
    "shape scalar": ('{"a":#"U8",2,[0,2]#}', "shape is not an array"),
    "shape rank": ('{"a":#"U8",[' + "1," * 64 + "2],[0,2]#}", "65 dimensions"),
    "shape zero and absurd": ('{"a":#"U8",[0,4611686018427387904],[0,0]#}', "exceeds"),
    "shape product": ('{"a":#"U8",[9999999999,9999999999],[0,2]#}', "exceeds"),
    "shape that wraps": ('{"a":#"U8",[4294967296,4294967296,2],[0,2]#}', "exceeds"),
    "shape digits": ('{"a":#"U8",[' + "9" * 5000 + "],[0,2]#}", "not an unsigned 64-bit"),
    "one offset": ('{"a":#"U8",[2],[0]#}', "not two integers"),
    "three offsets": ('{"a":#"U8",[2],[0,2,2]#}', "not two integers"),
    "boolean offset": ('{"a":#"U8",[2],[false,2]#}', "not two integers"),
    "offset order": ('{"a":#"U8",[2],[2,0]#}', "not in order"),
    "offset span": ('{"a":#"U8",[2],[0,1]#}', "span 1 bytes, U8 [2] takes 2"),
    "part of a byte": ('{"a":#"F4",[3],[0,2]#}', "do not fill whole bytes"),
    "empty name": ('{"":@}', "tensor name has 0 characters"),
    "long name": ('{"' + "n" * 1025 + '":@}', "1025 characters"),
    "NUL in name": ('{"a\\u0000":@}', "control character"),
    "terminal escape in name": ('{"a\\u001b[2J":@}', "control character"),
    "surrogate in name": ('{"\\udc00":@}', "lone surrogate"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    header, reason = REFUSED[case]
    header = re.sub(r"#([^,]+),(.+),(\[[^]]*\])#", r'{"dtype":\1,"shape":\2,"data_offsets":\3}', header)
    error = refused(pack(header.replace("@", entry()), b"12"))
    assert reason in error.message
    assert error.byte >= PREFIX_BYTES
    assert len(error.message) < 2000
    error.message.encode()  # what is said can be sent


def test_bytes_that_are_not_utf_8_are_refused_at_their_byte() -> None:
    assert refused(pack(b'{"\xff":1}')).byte == PREFIX_BYTES + 2


def test_a_refusal_names_tensor_and_byte_of_its_key() -> None:
    raw = pack(f'{{"a":{entry()},"layer.é":{entry(dtype="F33", offsets="[2,4]")}}}', b"1234")
    error = refused(raw)
    assert error.tensor == "layer.é"
    assert raw[error.byte :].startswith('"layer.é"'.encode())


def test_a_json_error_is_placed_by_bytes_not_characters() -> None:
    raw = pack('{"éé":}', b"")
    assert raw[refused(raw).byte :] == b"}"


def test_structure_is_bounded_before_it_is_parsed() -> None:
    error = refused(pack('{"a":[' + "[]," * 2_100_000 + "[]]}"))
    assert "more structure than" in error.message


@pytest.mark.parametrize("length", [HEADER_LIMIT_BYTES + 1, 1 << 63, (1 << 64) - 1])
def test_a_header_over_the_limit_is_refused_by_its_length_alone(length: int) -> None:
    with pytest.raises(CheckpointError, match=r"at most 100000000 are allowed") as caught:
        header_length(struct.pack("<Q", length), file="f", file_bytes=1 << 62)
    assert caught.value.byte == 0


def test_a_header_longer_than_the_file_is_refused() -> None:
    assert "truncated: header claims 400 bytes, 2 follow" in refused(pack("{}", length=400)).message


@pytest.mark.parametrize("size", range(PREFIX_BYTES))
def test_a_file_shorter_than_the_prefix_is_refused(size: int) -> None:
    with pytest.raises(CheckpointError, match="truncated"):
        header_length(b"\0" * size, file="f", file_bytes=size)


def test_an_empty_header_has_no_tensors() -> None:
    assert parse(pack("{}")) == ()
