"""Where NVRTC, which compiles the digest kernels, may lie on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

_SONAMES = ("libnvrtc.so.13", "libnvrtc.so.12")
_FOLDERS = ("cu13/lib", "cuda_nvrtc/lib")
"""Of the wheels `nvidia-cuda-nvrtc` (13) and `nvidia-cuda-nvrtc-cu12`, which torch brings along."""


def nvrtc_libraries(driver_version: int) -> list[str]:
    """What to try to open, best first: wheels, then the system; the driver's own major version first.

    `driver_version` is as cuDriverGetVersion gives it (13000 for 13.0).  An older compiler's code runs on
    a newer driver, not always the other way round.
    """
    own = f".so.{driver_version // 1000}"
    found = [*_in_wheels(_package_folders()), *_SONAMES]
    return sorted(found, key=lambda path: not path.endswith(own))


def _package_folders() -> list[Path]:
    spec = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []


def _in_wheels(packages: Sequence[Path]) -> Iterator[str]:
    for package in packages:
        for folder in _FOLDERS:
            for soname in _SONAMES:
                path = package / folder / soname
                if path.exists():
                    yield str(path)
