"""A load over a strict fake device."""

from __future__ import annotations

import threading

from loaderd.checkpoint.checkpoint import Checkpoint
from loaderd.load_request import LoadProgress, LoadRequest
from loaderd.loading import Loaded, load_and_verify
from loaderd.placement import PlacementRules, place
from loaderd.residents import Residents
from loaderd.seal.document import Seal, read_seal
from shared.gate import Pacer
from shared.ids import HOST_DEVICE, VersionRef
from tests.unit.memory.fake_backend import FakeBackend

REF = VersionRef("toy", "v1")
RUN_BYTES = 64 << 10
RULES = PlacementRules(slab_bytes=256 << 10, granularity_bytes=4096)


def load(
    checkpoint: Checkpoint,
    backend: FakeBackend,
    *,
    progress: LoadProgress | None = None,
    cancelled: threading.Event | None = None,
    pace: Pacer | None = None,
) -> Loaded:
    seal: Seal | None = read_seal(checkpoint.seal_bytes) if checkpoint.seal_bytes else None
    digests = seal.tensor_digests if seal is not None else {}
    placement = place(checkpoint.tensors, digests, Residents(), RULES)
    request = LoadRequest(REF, checkpoint, seal, placement, (), (HOST_DEVICE,))
    return load_and_verify(request, backend, progress or LoadProgress(), cancelled or threading.Event(), pace)
