"""What a process holds of the kernel's resources, to compare before and after."""

from __future__ import annotations

import gc
import os
from pathlib import Path


def open_fds() -> frozenset[str]:
    """Open fds with what they refer to; none of the call itself remains."""
    fds = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.add(f"{fd} {Path('/proc/self/fd', fd).readlink()}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return frozenset(fds)


def slab_mappings() -> tuple[str, ...]:
    """Lines of /proc/self/maps that belong to slabs, after collecting garbage."""
    gc.collect()
    lines = Path("/proc/self/maps").read_text().splitlines()
    return tuple(line for line in lines if "changeover-slab" in line)
