"""How much host memory this process could still take: the machine's, and its control group's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from shared.errors import DriverError

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that can be allocated without swapping or being killed for it.

    The kernel's own estimate for the machine, or less where the process's control group or one
    above it (version 2) has a `memory.max`.  Page cache that the group would give back counts as
    available.  Raises DriverError if the kernel does not tell.
    """
    bounds = [_mem_available(_read(proc / "meminfo"))]
    for group in _groups(_read(proc / "self" / "cgroup")):
        folder = cgroup / group
        limit = _read_optional(folder / "memory.max").strip()
        if limit and limit != "max":
            used = int(_read(folder / "memory.current"))
            reclaimable = _stat(_read(folder / "memory.stat"), "inactive_file")
            bounds.append(max(0, int(limit) - used + reclaimable))
    return min(bounds)


def _mem_available(meminfo: str) -> int:
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise DriverError("read(/proc/meminfo)", 0, "there is no line MemAvailable")


def _groups(self_cgroup: str) -> Iterator[PurePosixPath]:
    """The process's own group and all above it, relative to where cgroup2 is mounted."""
    for line in self_cgroup.splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            # A process outside the visible part of the tree is shown with leading `..`.
            own = PurePosixPath(*(part for part in path.split("/") if part not in ("", "..")))
            yield own
            yield from own.parents if own.parts else ()


def _stat(stat: str, name: str) -> int:
    for line in stat.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise DriverError(f"read({path})", error.errno or 0, error.strerror or "") from error


def _read_optional(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:  # the root group has no limits, and cgroup2 may not be mounted
        return ""
    except OSError as error:
        raise DriverError(f"read({path})", error.errno or 0, error.strerror or "") from error
