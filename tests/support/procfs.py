"""What the kernel knows of a process: its fds, threads and mappings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ ([rwxsp-]{4}) [0-9a-f]+ \S+ (\d+) *(.*)$")


@dataclass(frozen=True, slots=True)
class WeightMapping:
    """One mapping of a slab."""

    inode: int
    permissions: str
    rss_bytes: int
    pss_bytes: int


def fd_kinds(pid: int) -> Counter[str]:
    """How many fds of each kind a process has: sockets and pipes together, anonymous inodes by their name,
    files and memfds by their path."""
    kinds: Counter[str] = Counter()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue  # closed since it was listed
        kinds[re.sub(r"^(socket|pipe):.*", r"\1", target)] += 1
    return kinds


def open_fds() -> frozenset[str]:
    """Open fds of this process with what they refer to; none of the call itself remains.  Without the rings
    that readers of cold files make once and keep."""
    fds = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            fds.add(f"{fd.name} {fd.readlink()}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return frozenset(fd for fd in fds if "[io_uring]" not in fd)


def memfds(pid: int) -> int:
    """Open memfds of a process."""
    return sum(count for kind, count in fd_kinds(pid).items() if kind.startswith("/memfd:"))


def bytes_read(pid: int) -> int:
    """Bytes that a process has read from files and sockets since it started."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["rchar"])


def thread_count(pid: int) -> int:
    """Threads of a process."""
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def weight_mappings(pid: int) -> list[WeightMapping]:
    """Every mapping of a memfd in a process, from its smaps."""
    found: list[WeightMapping] = []
    inode, permissions, is_memfd, sizes = 0, "", False, {"Rss": 0, "Pss": 0}

    def flush() -> None:
        if is_memfd:
            found.append(WeightMapping(inode, permissions, sizes["Rss"], sizes["Pss"]))

    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        match = _MAPPING.match(line)
        if match is not None:
            flush()
            permissions, inode = match[1], int(match[2])
            is_memfd = match[3].startswith("/memfd:")
            sizes = {"Rss": 0, "Pss": 0}
            continue
        key, _, rest = line.partition(":")
        if key in sizes:
            sizes[key] = int(rest.split()[0]) * 1024
    flush()
    return found


def weight_pss(pids: Iterable[int]) -> int:
    """Proportional share of all memfd mappings, summed over processes: a page that several of them
    map counts once, as long as nobody else maps it."""
    return sum(mapping.pss_bytes for pid in pids for mapping in weight_mappings(pid))


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is of no file and not shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel says nothing of process {pid}")


def private_bytes(pid: int) -> int:
    """Memory that only this process has, from its smaps_rollup."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1]) * 1024
    return total


def descendants(pid: int) -> list[int]:
    """Children of a process."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
