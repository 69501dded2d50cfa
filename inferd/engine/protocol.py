"""What inferd asks of an engine, and the values that pass between the two.

An engine keeps up to two *slots* (the double buffer).  It never decides when to flip or which
version is current: `inferd.slots` does, and each request carries the slot it was admitted to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shared.ids import VersionTag

if TYPE_CHECKING:
    import torch

SLOTS = 2


class FlipKind(StrEnum):
    """How an engine turns to another version (see the architecture page)."""

    POINTER = "pointer"
    REMAP = "remap"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class EngineAbilities:
    """What an engine can do; sent to loaderd when inferd attaches."""

    name: str
    flip: FlipKind
    serves_two_versions: bool


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt.  Ranges are checked by the API before an engine sees them."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: the chosen token's and the n best
    logit_bias: Mapping[int, float] | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural) of one token, before temperature and penalties."""

    token_id: int
    logprob: float


class FinishReason(StrEnum):
    """Why a sequence ended, as OpenAI's API spells it (plus `error`)."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one step added to one sequence."""

    sequence_id: int
    text: str  # newly decoded text that can no longer be part of a stop string
    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, tuple[TokenLogprob, ...]], ...] = ()  # per token: chosen, best n
    finish: FinishReason | None = None
    error: str = ""  # with FinishReason.ERROR: what went wrong
    prompt_tokens: int = 0  # set on the last output
    completion_tokens: int = 0  # set on the last output
    cached_tokens: int = 0  # set on the last output: prompt tokens found in the prefix cache


OutputSink = Callable[[SequenceOutput], None]
"""Called on the engine's thread for each output of a sequence; must not block."""


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What warming showed: trial prompts run, seconds taken, digest of the greedy tokens."""

    prompts: int
    seconds: float
    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for health, metrics and `status`."""

    running: int
    waiting: int
    steps: int  # steps since start
    last_step_ns: int  # monotonic clock at the end of the last step, 0 before the first
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_cached: int  # free blocks that still hold reusable prefixes
    sequences_by_slot: tuple[int, ...]  # running and waiting, per slot
    tokens_generated: int
    preemptions: int
    decode_steps: int = 0  # right after another step, and of single next tokens only
    decode_ns: int = 0  # from the end of the step before to their end, all together


class Tokenizer(Protocol):
    """The part of a version's tokenizer that the API needs."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int]) -> str: ...

    def apply_chat_template(self, messages: list[dict[str, object]]) -> list[int]:
        """Token ids of the conversation with the generation prompt added; raises InvalidRequest
        when the model has no chat template or the template refuses the messages."""
        ...


class Engine(Protocol):
    """Model code over mapped weights.  `build`, `warm` and `retire` block and may run beside steps;
    `submit`, `cancel` and `load` are thread-safe and return at once."""

    @property
    def abilities(self) -> EngineAbilities: ...

    def start(self) -> None:
        """Start the step thread."""
        ...

    def stop(self) -> None:
        """End the step thread; sequences still there finish with ERROR."""
        ...

    def build(self, slot: int, tag: VersionTag, tensors: Mapping[str, torch.Tensor], assets: Path) -> None:
        """Build the model of `tag` in an empty `slot` over `tensors` (never written to and
        not copied: their memory may be mapped read-only; keys are checkpoint names; all on one device,
        where the version computes).  `assets` holds config.json and the tokenizer files.  Raises
        InvalidRequest where the tensors do not fit the config (missing, unexpected, shape, dtype).
        If it raises, the slot is still empty."""
        ...

    def warm(self, slot: int) -> WarmReport:
        """Run trial prompts; raises WarmupFailed on NaN or Inf, naming where they were first seen.
        Does ahead whatever the first requests would else wait for (kernels, CUDA graphs), so that a flip
        to the slot does none of it."""
        ...

    def retire(self, slot: int) -> None:
        """Drop the model, its graphs, KV blocks and prefix entries.  The caller knows that no sequence is
        left in the slot; raises InvariantError if one is.  Waits for the GPU work that used the weights:
        once it returns, nothing reads them any more, and the caller may unmap them."""
        ...

    def tokenizer(self, slot: int) -> Tokenizer:
        """The tokenizer of the version in `slot`."""
        ...

    def max_model_len(self, slot: int) -> int:
        """Longest prompt + completion, in tokens, that the slot's version and the KV cache allow."""
        ...

    def submit(
        self, sequence_id: int, slot: int, prompt: list[int], params: SamplingParams, sink: OutputSink
    ) -> None:
        """Queue a sequence on a slot.  Raises InvalidRequest if it can never fit, ResourceError if
        the queue is full."""
        ...

    def move(self, sequence_id: int, slot: int, *, keep_kv: bool) -> None:
        """Let a sequence go on with the version in `slot` from the next step: over the keys and values
        it has (`keep_kv`), or computing all its tokens anew.  Unknown ids are ignored.  Thread-safe."""
        ...

    def cancel(self, sequence_id: int) -> None:
        """End a sequence early; its sink gets CANCELLED.  Unknown ids are ignored (it just ended)."""
        ...

    def load(self) -> EngineLoad: ...
