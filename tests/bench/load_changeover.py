"""changeover's own loading as `load_loaders` measures it: open, plan, load and verify, as a push does."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from loaderd.checkpoint.checkpoint import Checkpoint, open_directory
from loaderd.crew import Crew
from loaderd.filling import Filling
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.loading import load_and_verify
from loaderd.placement import PlacementRules
from loaderd.plan import Candidate, DeviceMemory, Plan, plan_push
from loaderd.residents import Residents
from loaderd.seal.check import check_against
from loaderd.seal.document import Seal, read_seal
from shared.digest import file_digest
from shared.gate import Gate
from shared.ids import VersionRef
from shared.memory.backend import MemoryBackend, Slab
from shared.memory.selection import open_backend
from tests.bench.load_loaders import Loader, Resident, Setting
from tests.bench.load_report import COLD, OURS, Verification

_REF = VersionRef("bench", "v1")


@cache
def _backend(device: str) -> MemoryBackend:
    """One for the process, as loaderd has one: it keeps the pinned slots of its threads."""
    match device:
        case "cuda":
            return open_backend("cuda")
        case "host":
            return open_backend("host")
        case _:
            raise ValueError(device)


def load(folder: Path, device: str, setting: Setting) -> Resident:
    """A version in slabs of its own; `parts` are opening (headers, seal, plan) and loading."""
    verification = Verification(setting["verify"])
    backend = _backend(device)
    started = time.perf_counter()
    with ExitStack() as undo:
        checkpoint = undo.enter_context(open_directory(folder))
        seal = None
        if verification is Verification.SEALED:
            if checkpoint.seal_bytes is None:
                raise ValueError(f"{folder} has no seal")
            seal = read_seal(checkpoint.seal_bytes)
            check_against(checkpoint, seal)
        request = _request(checkpoint, seal, _plan(checkpoint, seal, backend), backend)
        opened = time.perf_counter()
        if verification is Verification.NONE:
            slabs = _fill(request, backend)
        else:
            slabs = load_and_verify(request, backend, LoadProgress(), threading.Event()).new_slabs
        loaded = time.perf_counter()
        places = request.placement.places
        tensors = {
            source.name: slabs[places[source.name].slab].tensor(
                places[source.name].offset_bytes, source.dtype, source.shape
            )
            for source in checkpoint.tensors
        }

    def close() -> None:
        for slab in slabs:
            slab.close()

    return Resident(tensors, close, {"open_s": opened - started, "load_s": loaded - opened})


def load_once(folder: Path, backend: MemoryBackend, *, verified: bool) -> tuple[float, int]:
    """Load once into new slabs and free them; seconds of the load, without its plan, and bytes."""
    with open_directory(folder) as checkpoint:
        request = _request(checkpoint, None, _plan(checkpoint, None, backend), backend)
        began = time.perf_counter()
        if verified:
            slabs = load_and_verify(request, backend, LoadProgress(), threading.Event()).new_slabs
        else:
            slabs = _fill(request, backend)
        seconds = time.perf_counter() - began
    for slab in slabs:
        slab.close()
    return seconds, request.placement.bytes_to_read


def _plan(checkpoint: Checkpoint, seal: Seal | None, backend: MemoryBackend) -> Plan:
    candidate = Candidate(
        name=str(_REF),
        tensors=checkpoint.tensors,
        digests=seal.tensor_digests if seal is not None else {},
        config=checkpoint.config,
        assets={name: file_digest(data) for name, data in checkpoint.assets.items()},
    )
    device = backend.devices()[0]
    memory = {device: DeviceMemory(backend.free_bytes(device))}
    rules = PlacementRules(slab_bytes=backend.slab_bytes)
    plan = plan_push(candidate, None, Residents(), memory, rules=rules)
    if plan.verdict != "hot":
        raise ValueError("; ".join(plan.reasons))
    return plan


def _request(checkpoint: Checkpoint, seal: Seal | None, plan: Plan, backend: MemoryBackend) -> LoadRequest:
    return LoadRequest(_REF, checkpoint, seal, plan.placement, (), backend.devices()[:1])


def _fill(request: LoadRequest, backend: MemoryBackend) -> tuple[Slab, ...]:
    """The reading of a load alone, on as many threads: what the daemon never offers to anyone."""
    with ExitStack() as undo:
        filling = Filling(request, backend, LoadProgress(), Gate(), lambda filled, slab: None, undo)
        with Crew(threading.Event()) as crew:
            crew.wait(filling.begin(crew))
            crew.check()
        slabs = filling.slabs
        undo.pop_all()
    return slabs


def _settings(place: str, device: str, cores: int) -> list[Setting]:
    modes = (Verification.DIGEST, Verification.NONE, Verification.SEALED)
    return [{"verify": mode.value} for mode in (modes[:2] if place == COLD else modes)]


CHANGEOVER = Loader(OURS, load, _settings, verification=lambda setting: Verification(setting["verify"]))
