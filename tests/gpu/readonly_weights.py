"""A process that serves from weights which the device itself protects from being written.

Run as `python -m tests.gpu.readonly_weights serve|write FOLDER...`.  Each checkpoint lies in memory of the
driver's virtual memory API that is mapped for reading only.  `serve` prints the tokens of answers, a list for
each folder, as JSON; `write` writes one element, which must end this process in an error.  A process of its
own, since a write that the device refuses costs the CUDA context.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch

from inferd.engine.protocol import SamplingParams
from tests.unit.engine.checkpoints import read_tensors

from .engine_cases import DEVICE, answers_of, opened, prompts_of, serve

PARAMS = SamplingParams(100, temperature=0, ignore_eos=True)
PROMPTS = prompts_of(6)
_ALIGNMENT = 256


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class Slab:
    """Physical memory of `size` bytes on device 0, mapped for reading and writing until `protect`."""

    def __init__(self, size: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        device = _Location(1, 0)
        properties = _Properties(type=1, location=device)
        granularity = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
        self._size = ctypes.c_size_t(-(-size // granularity.value) * granularity.value)
        self._device = device
        self._address, handle = ctypes.c_uint64(), ctypes.c_uint64()
        zero = ctypes.c_size_t(0)
        self._call(
            "cuMemCreate", ctypes.byref(handle), self._size, ctypes.byref(properties), ctypes.c_uint64(0)
        )
        self._call(
            "cuMemAddressReserve",
            ctypes.byref(self._address),
            self._size,
            zero,
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        self._call("cuMemMap", self._address, self._size, zero, handle, ctypes.c_uint64(0))
        self._allow(3)
        self.__cuda_array_interface__ = {
            "shape": (self._size.value,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
        }

    def protect(self) -> None:
        """From here on the memory can only be read."""
        torch.cuda.synchronize(DEVICE)
        self._allow(1)

    def _allow(self, flags: int) -> None:
        access = _Access(self._device, flags)
        self._call("cuMemSetAccess", self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed with {code}")


def place(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in one slab that can only be read."""
    offsets, end = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = end
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    slab = Slab(end)
    memory = torch.as_tensor(slab, device=DEVICE)
    placed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        span = memory[offsets[name] : offsets[name] + tensor.nbytes]
        placed[name] = span.view(tensor.dtype).view(tensor.shape)
        placed[name].copy_(tensor)
    slab.protect()
    return placed


def main() -> None:
    """See the module."""
    what, folders = sys.argv[1], [Path(folder) for folder in sys.argv[2:]]
    torch.zeros(1, device=DEVICE)  # makes the context current
    if what == "write":
        next(iter(place(read_tensors(folders[0])).values()))[0] = 0
        torch.cuda.synchronize(DEVICE)
        print(json.dumps("written"))
        return
    answers: list[list[list[int]]] = []
    for folder in folders:
        with opened() as session:
            engine = serve(session, folder, place(read_tensors(folder)))
            answers.append(answers_of(session, engine, PROMPTS, PARAMS))
            engine.retire(0)
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
