"""What a process holds of the kernel's resources, to compare before and after."""

from __future__ import annotations

from pathlib import Path


def open_fds() -> frozenset[str]:
    """Open fds with what they refer to; none of the call itself remains.  Without the rings that readers
    of cold files make once and keep."""
    fds = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            fds.add(f"{fd.name} {fd.readlink()}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return frozenset(fd for fd in fds if "[io_uring]" not in fd)


def slab_mappings() -> tuple[str, ...]:
    """Lines of /proc/self/maps that belong to slabs."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return tuple(line for line in lines if "changeover-slab" in line)


def slab_fds() -> tuple[int, ...]:
    """Fds of this process that refer to slabs."""
    return tuple(int(line.split()[0]) for line in open_fds() if "changeover-slab" in line)
