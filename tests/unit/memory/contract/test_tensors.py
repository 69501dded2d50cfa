"""Tensors over the bytes of a slab."""

from __future__ import annotations

import pytest
import torch

from shared.errors import InvalidRequest, InvariantError

from .pair import DATA, SLAB_BYTES, Pair


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("BOOL", torch.bool),
        ("U8", torch.uint8),
        ("I8", torch.int8),
        ("U16", torch.uint16),
        ("I16", torch.int16),
        ("U32", torch.uint32),
        ("I32", torch.int32),
        ("U64", torch.uint64),
        ("I64", torch.int64),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("F32", torch.float32),
        ("F64", torch.float64),
        ("C64", torch.complex64),
        ("F8_E4M3", torch.float8_e4m3fn),
        ("F8_E5M2", torch.float8_e5m2),
        ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
        ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
        ("F8_E8M0", torch.float8_e8m0fnu),
    ],
)
def test_tensors_show_the_resident_bytes(pair: Pair, dtype: str, expected: torch.dtype) -> None:
    with pair.sealed() as slab:
        tensor = slab.tensor(256, dtype, (2, 3))
        assert tensor.dtype == expected
        assert tensor.shape == (2, 3)
        assert tensor.is_contiguous()
        nbytes = 6 * expected.itemsize
        assert bytes(tensor.view(torch.uint8).flatten().tolist()) == DATA[256 : 256 + nbytes]
        # No copy: two tensors of the same place have the same address.
        assert slab.tensor(0, "U8", (1,)).data_ptr() + 256 == tensor.data_ptr()
        assert slab.tensor(256, "U8", (1,)).data_ptr() == tensor.data_ptr()


def test_scalars_and_empty_tensors_work(pair: Pair) -> None:
    with pair.sealed() as slab:
        assert slab.tensor(256, "I32", ()).item() == int.from_bytes(DATA[256:260], "little", signed=True)
        assert slab.tensor(256, "I32", ()).shape == ()
        for shape in ((0,), (3, 0), (0, 0, 5)):
            assert slab.tensor(0, "BF16", shape).shape == shape
            assert slab.tensor(SLAB_BYTES, "F32", shape).dtype == torch.float32


def test_two_f4_elements_share_a_byte(pair: Pair) -> None:
    with pair.sealed() as slab:
        tensor = slab.tensor(0, "F4", (3, 4))
        assert tensor.dtype == torch.float4_e2m1fn_x2
        assert tensor.shape == (3, 2)
        with pytest.raises(InvalidRequest):
            slab.tensor(0, "F4", (2, 3))
        with pytest.raises(InvalidRequest):
            slab.tensor(0, "F4", (4, 1))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("F6_E2M3", (4,)), ("F128", (1,)), ("", (1,)), ("F32", (-1,)), ("F32", (2**62, 2**62))],
)
def test_what_torch_cannot_show_is_refused(pair: Pair, dtype: str, shape: tuple[int, ...]) -> None:
    with pair.sealed() as slab, pytest.raises(InvalidRequest):
        slab.tensor(0, dtype, shape)


def test_an_address_that_does_not_suit_the_dtype_is_refused(pair: Pair) -> None:
    with pair.sealed() as slab, pytest.raises(InvariantError):
        slab.tensor(258, "F32", (1,))


def test_a_tensor_outlives_its_slab(pair: Pair) -> None:
    slab = pair.sealed()
    tensor = slab.tensor(512, "U8", (1000,))
    part = tensor[100:200]
    slab.close()
    del slab, tensor
    assert bytes(part.tolist()) == DATA[612:712]
