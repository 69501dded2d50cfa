"""Driver calls that the project itself never makes, to see that they are refused."""

from __future__ import annotations

import ctypes


def memset(ordinal: int, address: int, nbytes: int) -> int:
    """Zero device memory; answers the driver's code, 0 where it was done."""
    driver = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal))
    try:
        _check(driver.cuCtxPushCurrent_v2(context))
        try:
            result: int = driver.cuMemsetD8_v2(
                ctypes.c_uint64(address), ctypes.c_ubyte(0), ctypes.c_size_t(nbytes)
            )
            return result or int(driver.cuCtxSynchronize())
        finally:
            _check(driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))
    finally:
        _check(driver.cuDevicePrimaryCtxRelease_v2(ordinal))


def _check(result: int) -> None:
    if result != 0:
        raise RuntimeError(f"a driver call failed with {result}")
