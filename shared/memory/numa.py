"""Which processors are near a device, on hosts of several NUMA nodes."""

from __future__ import annotations

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def near_processors(node: int, nodes: Path = NODES) -> frozenset[int]:
    """The processors of a NUMA node that this process may use.

    None at all where the host has one node only, says nothing, or does not know `node`: then no
    processor is nearer than another."""
    try:
        if len(_numbers((nodes / "online").read_text())) < 2:
            return frozenset()
        processors = _numbers((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
    return frozenset(processors & os.sched_getaffinity(0))


def _numbers(text: str) -> set[int]:
    """The kernel's lists: `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
