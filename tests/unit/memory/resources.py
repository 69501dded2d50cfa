"""What this process holds of slabs, to compare before and after."""

from __future__ import annotations

from pathlib import Path

from tests.support.procfs import open_fds


def slab_mappings() -> tuple[str, ...]:
    """Lines of /proc/self/maps that belong to slabs."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return tuple(line for line in lines if "changeover-slab" in line)


def slab_fds() -> tuple[int, ...]:
    """Fds of this process that refer to slabs."""
    return tuple(int(line.split()[0]) for line in open_fds() if "changeover-slab" in line)
