"""What NVML said about a GPU at one moment, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_NAMED = 5
"""How many holders are named before the rest is counted."""

_MIB = 1 << 20

XIDS = {
    13: "an exception in a kernel",
    31: "a kernel read or wrote memory that is not mapped",
    43: "a context was stopped",
    45: "contexts were ended early, usually after another error",
    48: "an uncorrectable ECC error",
    63: "a row of memory was remapped",
    64: "a row of memory could not be remapped",
    74: "an NVLink error",
    79: "the GPU has fallen off the bus",
    92: "many corrected ECC errors",
    94: "an uncorrectable error that was contained",
    95: "an uncorrectable error that was not contained",
    119: "the GPU's system processor does not answer",
}
"""The numbers that matter to weights, from NVIDIA's list of Xid errors."""


@dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process that holds memory of a GPU; NVML may not tell how much."""

    pid: int
    name: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Memory, holders and error count of one GPU; None where NVML did not say."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    uncorrected_errors: int | None = None  # since the driver was loaded
    holders: tuple[GpuHolder, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """An Xid, or an uncorrectable ECC error where `xid` is None; `device` is the physical GPU's UUID."""

    device: str
    xid: int | None


def describe_holders(holders: Iterable[GpuHolder], own_pid: int) -> str:
    """One line that names who holds memory, the largest first; empty where nobody is known to."""
    ordered = sorted(holders, key=lambda each: (-(each.nbytes or 0), each.pid))
    if not ordered:
        return ""
    named = [_describe(each, own_pid) for each in ordered[:_NAMED]]
    if len(ordered) > _NAMED:
        rest = sum(each.nbytes or 0 for each in ordered[_NAMED:])
        named.append(f"{len(ordered) - _NAMED} more with {rest // _MIB} MiB")
    return f"GPU memory is held by {', '.join(named)}"


def _describe(holder: GpuHolder, own_pid: int) -> str:
    name = "this loaderd" if holder.pid == own_pid else holder.name
    held = "an unknown amount" if holder.nbytes is None else f"{holder.nbytes // _MIB} MiB"
    return f"pid {holder.pid} ({name}) with {held}"


def describe_event(event: GpuEvent) -> str:
    """What an event says, for people."""
    if event.xid is None:
        return f"{event.device} had an uncorrectable ECC error"
    meaning = XIDS.get(event.xid)
    return f"{event.device} reported Xid {event.xid}" + (f": {meaning}" if meaning else "")
