"""`RemappedRegion`: GPU addresses that stay while the slabs behind them are exchanged.

What an engine flips with when its captured graphs and compiled code hold addresses: it binds its
parameters to `tensor`s of the region once, and `exchange` puts another version's slabs under them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from shared import _native
from shared.errors import InvalidRequest, InvariantError
from shared.ids import DeviceId
from shared.memory.cuda import CudaSlab
from shared.memory.native_owner import NativeOwner
from shared.tensor_size import tensor_nbytes

if TYPE_CHECKING:
    import torch


@final
class RemappedRegion(NativeOwner[_native.RemappedRegion]):
    """A fixed range of addresses on one device; empty until the first `exchange`.

    Tensors of the region show whatever is mapped; reading them while nothing is (before the first
    `exchange`, after `close`) ends the process's GPU context.  Not thread-safe against itself.
    """

    __slots__ = ()

    def __init__(self, device: DeviceId, nbytes: int) -> None:
        """`nbytes` is the sum of the sizes of the slabs that will fill it."""
        if nbytes <= 0:
            raise InvariantError(f"a region cannot have {nbytes} bytes")
        super().__init__(_native.RemappedRegion(device, nbytes))

    @property
    def nbytes(self) -> int:
        return self._native.nbytes

    def exchange(self, slabs: Sequence[CudaSlab]) -> None:
        """Map `slabs`, one after the other, read-only, where others were; keeps their memory.

        Blocking: waits for the device first, then takes about a millisecond.  Nobody may submit work
        that uses the region meanwhile.  Where it fails, the old slabs are back.  Raises InvariantError
        unless the slabs are mapped memory of this device and fill the region, DriverError otherwise.
        """
        self._native.exchange([slab.native for slab in slabs])

    def tensor(self, offset_bytes: int, dtype: str, shape: Sequence[int]) -> torch.Tensor:
        """A tensor over the region's addresses.  Reads only; keeps the addresses, not a version."""
        from torch.utils.dlpack import from_dlpack

        from shared.memory.typed_view import typed_view

        try:
            nbytes = tensor_nbytes(dtype, shape)
        except ValueError as error:
            raise InvalidRequest(str(error), dtype=dtype) from error
        if offset_bytes < 0:
            raise InvariantError(f"a region has no byte {offset_bytes}")
        return typed_view(from_dlpack(self._native.view(offset_bytes, nbytes)), dtype, shape)

    def close(self) -> None:
        """Wait for the device and unmap the slabs."""
        super().close()
