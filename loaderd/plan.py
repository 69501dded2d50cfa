"""The plan of a push: what will be read, shared and allocated, and whether it can work at all.

Pure: everything it knows is in its arguments, and `push --dry-run` shows what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loaderd.checkpoint.header import TensorSource
from loaderd.checkpoint.names import CONFIG_FILE
from loaderd.compatibility import (
    ConfigChange,
    TensorChanges,
    TensorSignature,
    compare_assets,
    compare_configs,
    compare_tensors,
    is_tokenizer_file,
)
from loaderd.placement import Placement, PlacementRules, ReadExtent, SharedTensor, place
from loaderd.residents import Residents, ResidentSlab
from shared.ids import DeviceId, Digest
from shared.layout import Layout

_NAMED = 3
"""How many tensors the reasons name before they count the rest."""

_CONFIG_KEYS = 8
"""How many keys of the config are named before the rest is counted."""


class Verdict(StrEnum):
    """What a push would do: replace while serving, or nothing.  `cold` is for what would have room only
    in place of what serves, which no push unloads."""

    HOT = "hot"
    COLD = "cold"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Candidate:
    """The version to be pushed."""

    name: str
    tensors: Sequence[TensorSource]
    digests: Mapping[str, Digest]  # by tensor name, from the seal; empty if there is none
    config: Mapping[str, object]
    assets: Mapping[str, Digest]  # flat SHA-256 by file name
    ignored: Sequence[str] = ()
    is_signed: bool = False


@dataclass(frozen=True, slots=True)
class Serving:
    """The version that answers requests now."""

    name: str
    layout: Layout
    config: Mapping[str, object]
    assets: Mapping[str, Digest]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one device: what an allocation could get, and what weights may take there in all."""

    free_bytes: int
    limit_bytes: int | None = None
    holders: str = ""  # one line that names who holds what is not free; empty where it is not known


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What a push would do to the memory of one device."""

    device: DeviceId
    bytes_to_allocate: int  # new slabs, and replicas of shared ones that it lacks
    freed_bytes: int  # by what has to go first
    free_bytes: int  # now, by the driver or the kernel
    room_bytes: int  # now, within the limit for weights too; negative where a lowered one is exceeded
    peak_bytes: int  # weight memory while both versions are resident

    @property
    def missing_bytes(self) -> int:
        """Bytes that it cannot hold; negative where there is more room than needed."""
        return self.bytes_to_allocate - self.freed_bytes - self.room_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: verdict, reasons, sizes, and the placement that a load carries out."""

    verdict: Verdict
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    bytes_total: int  # distinct content
    devices: tuple[DevicePlan, ...]
    sweep_first: bool  # the retained version must go before anything is allocated
    placement: Placement
    shared_slabs: tuple[ResidentSlab, ...]  # in the order of placement.shared_slabs
    tensor_changes: TensorChanges
    config_changes: tuple[ConfigChange, ...]
    files_changed: tuple[str, ...]
    tokenizer_changed: bool

    @property
    def bytes_to_read(self) -> int:
        """Bytes to read from files."""
        return self.placement.bytes_to_read

    @property
    def bytes_to_share(self) -> int:
        """Distinct resident bytes that the version uses where they lie."""
        return self.placement.bytes_to_share

    @property
    def tightest(self) -> DevicePlan:
        """The device with the least to spare: it decides."""
        return _tightest(self.devices)

    @property
    def slabs(self) -> tuple[int, ...]:
        """Sizes of the new slabs in bytes."""
        return self.placement.slabs

    @property
    def reads(self) -> tuple[ReadExtent, ...]:
        """What is read, by file and offset."""
        return self.placement.reads

    @property
    def shared(self) -> tuple[SharedTensor, ...]:
        """Tensors that are resident already."""
        return self.placement.shared


def plan_push(
    candidate: Candidate,
    serving: Serving | None,
    residents: Residents,
    memory: Mapping[DeviceId, DeviceMemory],
    *,
    retained: str | None = None,
    rules: PlacementRules | None = None,
) -> Plan:
    """Decide how `candidate` would replace `serving`; nothing is changed and nothing is read.

    `residents` are all versions on the host, by the names in `serving.name` and `retained`; `memory` is
    that of each device that is to have a copy.
    """
    rules = rules or PlacementRules()
    changes = _Changes.between(candidate, serving)
    fit = _fit(candidate, serving, residents, memory, retained, rules)
    verdict = Verdict.REFUSE if changes.refusals else fit.verdict
    placement = fit.placement
    return Plan(
        verdict=verdict,
        reasons=(*changes.refusals, *fit.reasons),
        warnings=(*changes.warnings, *_load_warnings(candidate, placement)),
        bytes_total=placement.bytes_to_read + placement.bytes_to_share,
        devices=fit.devices,
        sweep_first=fit.sweep_first and verdict is not Verdict.REFUSE,
        placement=placement,
        shared_slabs=tuple(residents.slabs[slab_id] for slab_id in placement.shared_slabs),
        tensor_changes=changes.tensors,
        config_changes=changes.config,
        files_changed=changes.files,
        tokenizer_changed=any(is_tokenizer_file(name) for name in changes.files),
    )


@dataclass(frozen=True, slots=True)
class _Fit:
    """One way to fit into memory, or why there is none."""

    verdict: Verdict
    placement: Placement
    devices: tuple[DevicePlan, ...]
    sweep_first: bool = False
    reasons: tuple[str, ...] = ()


def _tightest(devices: Sequence[DevicePlan]) -> DevicePlan:
    return max(devices, key=lambda each: each.missing_bytes)


def _fit(
    candidate: Candidate,
    serving: Serving | None,
    residents: Residents,
    memory: Mapping[DeviceId, DeviceMemory],
    retained: str | None,
    rules: PlacementRules,
) -> _Fit:
    """The gentlest way to fit: beside everything, after a sweep, or after unloading what serves."""

    def attempt(gone: frozenset[str], avoid: frozenset[str]) -> tuple[Placement, tuple[DevicePlan, ...]]:
        """Placement, and what it means for each device when `gone` went first."""
        placement = place(candidate.tensors, candidate.digests, residents, rules, avoid)
        return placement, tuple(
            _device_plan(device, memory[device], placement, residents, gone) for device in memory
        )

    nothing: frozenset[str] = frozenset()
    placement, devices = attempt(nothing, nothing)
    least = _tightest(devices)
    if least.missing_bytes <= 0:
        return _Fit(Verdict.HOT, placement, devices)

    swept = nothing
    if retained is not None and (serving is None or retained != serving.name):
        swept = frozenset({retained})
        # Sharing with the version that is to go keeps its slabs: try with it, then without.
        for avoid in (nothing, swept):
            placement, devices = attempt(swept, avoid)
            least = min(least, _tightest(devices), key=lambda each: each.missing_bytes)
            if least.missing_bytes <= 0:
                return _Fit(Verdict.HOT, placement, devices, sweep_first=True)

    if serving is not None:
        unloaded = swept | {serving.name}
        placement, devices = attempt(unloaded, unloaded)
        if _tightest(devices).missing_bytes <= 0:
            reason = (
                f"{least.missing_bytes} bytes are missing on {least.device} to hold {candidate.name} beside "
                f"{serving.name}, which serves and which no push unloads"
                + _needed_limit(memory[least.device], least)
                + _holders(memory[least.device], least.missing_bytes + least.room_bytes)
            )
            return _Fit(Verdict.COLD, placement, devices, sweep_first=bool(swept), reasons=(reason,))

    tight = _tightest(devices)
    limit_bytes = memory[tight.device].limit_bytes
    limit = "" if limit_bytes is None else f" (memory_limit_bytes is {limit_bytes})"
    reason = (
        f"{candidate.name} needs {tight.bytes_to_allocate} bytes on {tight.device}, "
        f"{max(tight.room_bytes, 0)} are free there{limit}, and unloading what it may replace frees "
        f"{tight.freed_bytes}: {tight.missing_bytes} bytes are missing"
        + _holders(memory[tight.device], tight.missing_bytes + tight.room_bytes)
    )
    # Nothing will go.
    devices = tuple(_device_plan(device, memory[device], placement, residents, nothing) for device in memory)
    return _Fit(Verdict.REFUSE, placement, devices, reasons=(reason,))


def _device_plan(
    device: DeviceId, memory: DeviceMemory, placement: Placement, residents: Residents, gone: frozenset[str]
) -> DevicePlan:
    used_bytes = residents.bytes_on(device)
    room_bytes = memory.free_bytes
    if memory.limit_bytes is not None:
        room_bytes = min(room_bytes, memory.limit_bytes - used_bytes)
    new_bytes = placement.bytes_to_allocate + residents.bytes_lacking(device, placement.shared_slabs)
    freed_bytes = residents.freed_bytes(device, gone, frozenset(placement.shared_slabs))
    return DevicePlan(
        device, new_bytes, freed_bytes, memory.free_bytes, room_bytes, used_bytes - freed_bytes + new_bytes
    )


def _needed_limit(memory: DeviceMemory, device: DevicePlan) -> str:
    """The limit for weights and what it would have to be, where less is free within it than on the device."""
    if memory.limit_bytes is None or device.room_bytes >= memory.free_bytes:
        return ""
    needed_bytes = memory.limit_bytes + device.missing_bytes
    return f"; memory_limit_bytes is {memory.limit_bytes}, at least {needed_bytes} is needed"


def _holders(memory: DeviceMemory, needed_bytes: int) -> str:
    """Who holds the device's memory, where that and not the limit for weights is what is missing."""
    return f"; {memory.holders}" if memory.holders and needed_bytes > memory.free_bytes else ""


@dataclass(frozen=True, slots=True)
class _Changes:
    """How the candidate differs from what serves."""

    tensors: TensorChanges
    config: tuple[ConfigChange, ...]
    files: tuple[str, ...]
    refusals: tuple[str, ...]

    @classmethod
    def between(cls, candidate: Candidate, serving: Serving | None) -> _Changes:
        """Compare; with nothing serving, nothing differs."""
        if serving is None:
            return cls(TensorChanges(), (), (), ())
        found = {t.name: TensorSignature(t.dtype, t.shape) for t in candidate.tensors}
        expected = {t.name: TensorSignature(t.dtype, t.shape) for t in serving.layout.tensors}
        tensors = compare_tensors(found, expected)
        config = compare_configs(candidate.config, serving.config)
        refusals = [
            *_some(tensors.added, "is not in the serving version", "are not in it either"),
            *_some(tensors.removed, "of the serving version is missing", "of it are missing"),
            *_differences(sorted({*tensors.reshaped, *tensors.retyped}), found, expected),
        ]
        if tensors:
            size = sum(t.nbytes for t in candidate.tensors)
            served = sum(t.nbytes for t in serving.layout.tensors)
            if size != served:
                refusals.append(f"tensors have {size} bytes in all, the serving version's have {served}")
        refusals.extend(_first([str(change) for change in config if change.is_architecture]))
        return cls(tensors, config, compare_assets(candidate.assets, serving.assets), tuple(refusals))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Differences that a push may have, but that someone should know of."""
        return (
            *_first([str(change) for change in self.config if not change.is_architecture]),
            *(
                f"{name} differs from the serving version's"
                + (": the same text may become other tokens" if is_tokenizer_file(name) else "")
                for name in self.files
            ),
        )


def _first(lines: Sequence[str]) -> list[str]:
    """The first few differences between configs, and a line that counts the rest."""
    if len(lines) <= _CONFIG_KEYS:
        return list(lines)
    return [*lines[:_CONFIG_KEYS], f"{len(lines) - _CONFIG_KEYS} more keys of {CONFIG_FILE} differ"]


def _some(names: Sequence[str], one: str, many: str) -> list[str]:
    """Lines for the first few tensors, and one that counts the rest."""
    lines = [f"tensor {name!r} {one}" for name in names[:_NAMED]]
    if len(names) > _NAMED:
        lines.append(f"{len(names) - _NAMED} more tensors {many}")
    return lines


def _differences(
    names: Sequence[str], found: Mapping[str, TensorSignature], expected: Mapping[str, TensorSignature]
) -> list[str]:
    lines = [
        f"tensor {name!r} is {found[name]}, the serving version has {expected[name]}"
        for name in names[:_NAMED]
    ]
    if len(names) > _NAMED:
        lines.append(f"{len(names) - _NAMED} more tensors have another shape or dtype")
    return lines


def _load_warnings(candidate: Candidate, placement: Placement) -> tuple[str, ...]:
    lines = list(candidate.ignored[:_NAMED])
    if len(candidate.ignored) > _NAMED:
        lines.append(f"{len(candidate.ignored) - _NAMED} more files or tensors of the folder are ignored")
    if not candidate.digests and candidate.is_signed:
        lines.append(
            f"{candidate.name} has no seal: all of it is hashed before it is loaded, and only then shared"
        )
    elif not candidate.digests:
        lines.append(f"{candidate.name} has no seal: nothing can be shared, and only reading it shows damage")
    elif not placement.reads:
        lines.append(f"all tensors of {candidate.name} are resident already")
    return tuple(lines)
