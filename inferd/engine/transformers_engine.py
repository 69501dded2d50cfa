"""`TransformersEngine`: the built-in engine.  A module per slot, one paged KV cache for both.

Sequences choose their slot, so a flip moves nothing here: what `inferd.slots` exchanges is the slot
that new sequences are given.  The engine computes where the first version's tensors lie; on a CUDA
device, a slot's decoding steps are captured when it is warmed, so that a flip captures nothing either.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import torch

from inferd.engine.blocks import BlockPool, PrefixKey
from inferd.engine.detokenize import TextStream
from inferd.engine.forward import run_forward
from inferd.engine.kv_cache import KvCache
from inferd.engine.lanes import Lanes
from inferd.engine.model import VersionModel, build_model
from inferd.engine.protocol import (
    SLOTS,
    EngineAbilities,
    EngineLoad,
    FlipKind,
    OutputSink,
    SamplingParams,
    Tokenizer,
    WarmReport,
)
from inferd.engine.sampling import Sampler
from inferd.engine.scheduler import Limits, Scheduler, Sequence, SlotBatch
from inferd.engine.step_graphs import StepGraphs
from inferd.engine.step_loop import Live, StepLoop
from inferd.engine.warm import probe_model, warm_model
from shared.errors import InvalidRequest, InvariantError
from shared.ids import VersionTag

_MIXED_TOKENS = 128
"""Few enough for a step to be hardly longer than reading the weights once."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How large the engine may grow.  `torch_threads` is for the step thread; None leaves torch's own."""

    # None: 1 GiB on the CPU, on a CUDA device `kv_cache_share` of what is free when the first version is
    # built.  The rest is for the weights of the next version, its graphs and what a step needs.
    kv_cache_bytes: int | None = None
    kv_cache_share: float = 0.5
    block_tokens: int = 16
    max_batch_tokens: int = 512
    # Of a step in which sequences decode, prompts' chunks included: what keeps their pace.  None: 128, or
    # twice `max_sequences` where that is more, and `max_batch_tokens` at most.
    mixed_batch_tokens: int | None = None
    max_sequences: int = 64
    max_waiting: int = 256
    max_model_len: int | None = None  # None: what the version's positions allow
    torch_threads: int | None = None
    cuda_graphs: bool = True  # capture steps of up to `mixed_batch_tokens`; nothing on the CPU

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or (self.kv_cache_bytes is not None and self.kv_cache_bytes < 1):
            raise InvalidRequest("block_tokens and kv_cache_bytes must be at least 1")
        if not 0 < self.kv_cache_share < 1:
            raise InvalidRequest("kv_cache_share must lie between 0 and 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidRequest("max_model_len must be at least 2: a prompt token and one to generate")
        self.limits()

    def limits(self) -> Limits:
        """The scheduler's part."""
        mixed = self.mixed_batch_tokens
        if mixed is None:
            mixed = min(self.max_batch_tokens, max(_MIXED_TOKENS, 2 * self.max_sequences))
        return Limits(self.max_batch_tokens, self.max_sequences, self.max_waiting, mixed)


class TransformersEngine:
    """Implements `Engine`; both slots' versions answer side by side."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._models: dict[int, VersionModel] = {}
        self._graphs: dict[int, StepGraphs] = {}
        self._cache: KvCache | None = None
        self._lanes = Lanes(torch.device("cpu"))  # until the first build says where
        # One build or retirement at a time: the first build decides the geometry of the cache.
        self._slots_change = threading.Lock()
        self._loop = StepLoop(
            Scheduler(BlockPool(0, settings.block_tokens), settings.limits()),
            self._forward,
            self._clear,
            settings.torch_threads,
            lambda: self._lanes.stepping(),
        )

    @property
    def abilities(self) -> EngineAbilities:
        return EngineAbilities("transformers", FlipKind.POINTER, serves_two_versions=True)

    def start(self) -> None:
        self._loop.start()

    def stop(self) -> None:
        self._loop.stop()

    def build(self, slot: int, tag: VersionTag, tensors: Mapping[str, torch.Tensor], assets: Path) -> None:
        if not 0 <= slot < SLOTS:
            raise InvariantError(f"there is no slot {slot}")
        with self._slots_change:
            if slot in self._models:
                raise InvariantError(f"slot {slot} still holds {self._models[slot].tag}")
            self._choose_device(tensors)
            with self._lanes.preparing():
                model = build_model(tag, tensors, assets, self._settings.max_model_len)
                try:
                    self._fit_cache(model)
                    probe_model(model)
                except BaseException:
                    # Modules are cyclic garbage: their weights would stay mapped until it is collected.
                    model.forget_weights()
                    raise
            with self._loop.lock:
                self._models[slot] = model

    def warm(self, slot: int) -> WarmReport:
        with self._slots_change:
            model, cache, started = self._model(slot), self._cache, monotonic()
            if cache is None:
                raise InvariantError("a slot was warmed before a version was built")
            with self._lanes.preparing() as captures:
                tokens = warm_model(model)
                graphs = None
                if captures is not None and self._settings.cuda_graphs and slot not in self._graphs:
                    limits = self._settings.limits()
                    graphs = StepGraphs.capture(
                        model,
                        cache,
                        captures,
                        sequences=limits.max_sequences,
                        widest=limits.tokens_beside_decodes,
                        longest=self.max_model_len(slot),
                    )
            self._lanes.trim()
            if graphs is not None:
                with self._loop.lock:
                    self._graphs[slot] = graphs
            return WarmReport(len(tokens), monotonic() - started, tokens)

    def retire(self, slot: int) -> None:
        with self._slots_change:
            with self._loop.lock:
                model = self._model(slot)
                if self._loop.moving_to(slot):
                    raise InvariantError(f"slot {slot} is retired with sequences moving to it")
                others = [other.tag.digest for number, other in self._models.items() if number != slot]
                self._loop.scheduler.forget(
                    slot, PrefixKey.root(model.tag.digest), is_shared=model.tag.digest in others
                )
                del self._models[slot]
                graphs = self._graphs.pop(slot, None)
            # A step that failed half-way leaves work behind that still reads the weights.
            self._lanes.finish_steps()
            if graphs is not None:
                graphs.close()
                del graphs
            model.forget_weights()
            self._lanes.trim()

    def tokenizer(self, slot: int) -> Tokenizer:
        return self._model(slot).tokenizer

    def max_model_len(self, slot: int) -> int:
        model = self._model(slot)
        pool = self._loop.scheduler.pool
        limit = self._settings.max_model_len or model.max_positions
        return min(limit, model.max_positions, pool.total * pool.block_tokens)

    def submit(
        self, sequence_id: int, slot: int, prompt: list[int], params: SamplingParams, sink: OutputSink
    ) -> None:
        with self._loop.lock:
            model = self._model(slot)
            longest = self.max_model_len(slot)
            if len(prompt) + params.max_tokens > longest:
                raise InvalidRequest(
                    f"{len(prompt)} prompt tokens and {params.max_tokens} to generate exceed the "
                    f"{longest} tokens that {model.tag.ref} allows",
                    prompt_tokens=len(prompt),
                    max_tokens=params.max_tokens,
                    max_model_len=longest,
                )
            for token in (*prompt, *(params.logit_bias or ())):
                if not 0 <= token < model.vocabulary:
                    raise InvalidRequest(f"token {token} is outside the vocabulary of {model.vocabulary}")
            root = PrefixKey.root(model.tag.digest)
            sequence = Sequence(sequence_id, slot, root, list(prompt), params.max_tokens)
            text = TextStream(model.tokenizer.decode, params.stop)
            self._loop.add(Live(sequence, Sampler(params, prompt), text, sink, model.end_tokens))

    def cancel(self, sequence_id: int) -> None:
        self._loop.cancel(sequence_id)

    def move(self, sequence_id: int, slot: int, *, keep_kv: bool) -> None:
        """Let a sequence go on with the version in `slot` from the next step: over the keys and values
        it has (`keep_kv`), or computing all its tokens anew.  Unknown ids are ignored."""
        with self._loop.lock:
            root = PrefixKey.root(self._model(slot).tag.digest)
            self._loop.move(sequence_id, slot, root, is_kept=keep_kv)

    def load(self) -> EngineLoad:
        return self._loop.load()

    # --- inside ----------------------------------------------------------------------------------

    def _model(self, slot: int) -> VersionModel:
        model = self._models.get(slot)
        if model is None:
            raise InvariantError(f"slot {slot} is empty")
        return model

    def _fit_cache(self, model: VersionModel) -> None:
        """Make the cache for the first version; raises InvalidRequest if a later one does not fit it."""
        cache, settings = self._cache, self._settings
        if cache is not None and cache.geometry == model.geometry:
            return
        if self._models and cache is not None:
            raise InvalidRequest(
                f"{model.tag.ref} keeps {model.geometry} per token, the KV cache holds {cache.geometry}"
            )
        block_bytes = model.geometry.bytes_per_token * settings.block_tokens
        cache_bytes = self._cache_bytes(model.geometry.device)
        # One block more is made, for padding.
        blocks = cache_bytes // block_bytes
        if blocks < 1:
            raise InvalidRequest(f"kv_cache_bytes {cache_bytes} holds no block of {block_bytes} bytes")
        cache = KvCache(model.geometry, blocks, settings.block_tokens)
        with self._loop.lock:
            # No version is built, so no sequence is there and nothing refers to the old blocks.
            self._cache = cache
            self._loop.scheduler.pool = BlockPool(blocks, settings.block_tokens)

    def _cache_bytes(self, device: torch.device) -> int:
        settings = self._settings
        if settings.kv_cache_bytes is not None:
            return settings.kv_cache_bytes
        if device.type != "cuda":
            return 1 << 30
        self._cache = None  # one of another geometry makes room
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * settings.kv_cache_share)

    def _choose_device(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go where the tensors are, unless a version is there already, whose cache a newcomer must fit."""
        device = next((tensor.device for tensor in tensors.values()), None)
        if device is None or self._models or device == self._lanes.device:
            return
        lanes = Lanes(device)
        with self._loop.lock:
            self._lanes = lanes

    def _forward(self, batch: SlotBatch) -> torch.Tensor:
        if self._cache is None:
            raise InvariantError("a step ran before a version was built")
        graphs = self._graphs.get(batch.slot)
        if graphs is not None and graphs.fits(batch):
            return graphs.run(batch.chunks)
        return run_forward(self._models[batch.slot], self._cache, batch.chunks, batch.decodes)

    def _clear(self, blocks: tuple[int, ...]) -> None:
        if blocks and self._cache is not None:
            self._cache.clear(blocks)
