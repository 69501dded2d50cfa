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
from loaderd.placement import Placement, PlacementRules, ReadExtent, Residents, SharedTensor, place
from shared.ids import Digest
from shared.layout import Layout

_NAMED = 3
"""How many tensors the reasons name before they count the rest."""

_CONFIG_KEYS = 8
"""How many keys of the config are named before the rest is counted."""


class Verdict(StrEnum):
    """What a push would do: replace while serving, replace after unloading, or nothing."""

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
    """Memory of the device: what an allocation could get, and what weights may take in all."""

    free_bytes: int
    limit_bytes: int | None = None
    holders: str = ""  # one line that names who holds what is not free; empty where it is not known


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer: verdict, reasons, sizes, and the placement that a load carries out."""

    verdict: Verdict
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]
    bytes_total: int  # distinct content
    peak_bytes: int  # weight memory while both versions are resident
    free_bytes: int
    sweep_first: bool  # the retained version must go before anything is allocated
    placement: Placement
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
    def bytes_to_allocate(self) -> int:
        """Bytes of new slabs."""
        return self.placement.bytes_to_allocate

    @property
    def slabs(self) -> tuple[int, ...]:
        """Sizes of the new slabs in bytes."""
        return self.placement.slabs

    @property
    def reads(self) -> tuple[ReadExtent, ...]:
        """Reads by file and offset."""
        return self.placement.reads

    @property
    def shared(self) -> tuple[SharedTensor, ...]:
        """Tensors that are resident already."""
        return self.placement.shared


def plan_push(
    candidate: Candidate,
    serving: Serving | None,
    residents: Residents,
    memory: DeviceMemory,
    *,
    retained: str | None = None,
    rules: PlacementRules | None = None,
) -> Plan:
    """Decide how `candidate` would replace `serving`; nothing is changed and nothing is read.

    `residents` are all versions on the device, by the names in `serving.name` and `retained`.
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
        peak_bytes=residents.total_bytes - fit.freed_bytes + placement.bytes_to_allocate,
        free_bytes=memory.free_bytes,
        sweep_first=fit.sweep_first and verdict is not Verdict.REFUSE,
        placement=placement,
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
    freed_bytes: int
    sweep_first: bool = False
    reasons: tuple[str, ...] = ()


def _fit(
    candidate: Candidate,
    serving: Serving | None,
    residents: Residents,
    memory: DeviceMemory,
    retained: str | None,
    rules: PlacementRules,
) -> _Fit:
    """The gentlest way to fit: beside everything, after a sweep, or after unloading what serves."""

    def attempt(gone: frozenset[str], avoid: frozenset[str]) -> tuple[Placement, int, int]:
        """Placement, bytes freed first, and bytes that are missing then."""
        placement = place(candidate.tensors, candidate.digests, residents, rules, avoid)
        freed = residents.freed_bytes(gone, frozenset(placement.shared_slabs))
        return placement, freed, placement.bytes_to_allocate - room - freed

    room = _room(residents, memory)
    nothing: frozenset[str] = frozenset()
    placement, freed, missing = attempt(nothing, nothing)
    if missing <= 0:
        return _Fit(Verdict.HOT, placement, freed)
    least_missing = missing

    swept = nothing
    if retained is not None and (serving is None or retained != serving.name):
        swept = frozenset({retained})
        # Sharing with the version that is to go keeps its slabs: try with it, then without.
        for avoid in (nothing, swept):
            placement, freed, missing = attempt(swept, avoid)
            if missing <= 0:
                return _Fit(Verdict.HOT, placement, freed, sweep_first=True)
            least_missing = min(least_missing, missing)

    if serving is not None:
        unloaded = swept | {serving.name}
        placement, freed, missing = attempt(unloaded, unloaded)
        if missing <= 0:
            reason = (
                f"{least_missing} bytes are missing to hold {candidate.name} beside {serving.name}: "
                f"it fits only after {serving.name} is unloaded" + _holders(memory, least_missing + room)
            )
            return _Fit(Verdict.COLD, placement, freed, sweep_first=bool(swept), reasons=(reason,))

    limit = "" if memory.limit_bytes is None else f" (the limit for weights is {memory.limit_bytes})"
    reason = (
        f"{candidate.name} needs {placement.bytes_to_allocate} bytes, {max(room, 0)} are free{limit}, "
        f"and unloading what it may replace frees {freed}: {missing} bytes are missing"
        + _holders(memory, missing + room)
    )
    return _Fit(Verdict.REFUSE, placement, 0, reasons=(reason,))


def _holders(memory: DeviceMemory, needed_bytes: int) -> str:
    """Who holds the device's memory, where that and not the limit for weights is what is missing."""
    return f"; {memory.holders}" if memory.holders and needed_bytes > memory.free_bytes else ""


def _room(residents: Residents, memory: DeviceMemory) -> int:
    """Bytes that can be allocated now; negative where a lowered limit is exceeded already."""
    if memory.limit_bytes is None:
        return memory.free_bytes
    return min(memory.free_bytes, memory.limit_bytes - residents.total_bytes)


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
