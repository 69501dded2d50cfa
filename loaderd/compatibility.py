"""Whether a version can take another's place: tensor tables, configs and tokenizer files compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from loaderd.checkpoint.names import CONFIG_FILE, TOKENIZER_FILES
from shared.ids import Digest

_HARMLESS = ("_*", "transformers_version", "architectures", "use_cache", "dtype", "torch_dtype", "auto_map")
"""Keys that say how a config came about, or that the tensor table says better."""

_ARCHITECTURE = (
    "model_type", "hidden_act", "layer_types", "tie_word_embeddings", "is_decoder", "is_encoder_decoder",
    "add_cross_attention", "parallel_attn", "multi_query", "new_decoder_architecture",
    "num_*", "n_head*", "n_layer*", "n_embd*", "n_inner", "n_positions", "n_group*", "n_routed*", "n_shared*",
    "topk_*", "attention_chunk*",
    "*_size", "*_dim", "*_dims", "*_rank", "*_layers", "*_heads", "*_pattern", "*_interval", "*_eps",
    "*_epsilon", "*bias", "*scale", "*_multiplier", "*rope*", "*rotary*", "*alibi*", "*norm*", "*activation*",
    "*window*", "*expert*", "*moe*", "*scaling*", "*softcap*", "*quantization*",
)  # fmt: skip
"""Keys whose value is part of the computation: with another one, the same weights mean another model."""

_ABSENT = "absent"
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """What must stay equal for a tensor to be exchanged in place."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class TensorChanges:
    """Names of tensors that differ, sorted; a tensor with another dtype and shape is in both lists."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()
    retyped: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.reshaped or self.retyped)


@dataclass(frozen=True, slots=True)
class ConfigChange:
    """A key of config.json (dotted where nested) with another value than the serving version's."""

    key: str
    expected: str
    found: str
    is_architecture: bool

    def __str__(self) -> str:
        key = self.key if len(self.key) <= _SHOWN_CHARS else f"{self.key[:_SHOWN_CHARS]}…"
        return f"{CONFIG_FILE}: {key} is {self.found}, the serving version's is {self.expected}"


def compare_tensors(
    candidate: Mapping[str, TensorSignature], serving: Mapping[str, TensorSignature]
) -> TensorChanges:
    """Names that were added, removed, reshaped or retyped."""
    both = sorted(candidate.keys() & serving.keys())
    return TensorChanges(
        added=tuple(sorted(candidate.keys() - serving.keys())),
        removed=tuple(sorted(serving.keys() - candidate.keys())),
        reshaped=tuple(name for name in both if candidate[name].shape != serving[name].shape),
        retyped=tuple(name for name in both if candidate[name].dtype != serving[name].dtype),
    )


def compare_configs(
    candidate: Mapping[str, object], serving: Mapping[str, object]
) -> tuple[ConfigChange, ...]:
    """Keys whose values differ, sorted, without the harmless ones; null counts as absent."""
    found, expected = _flatten(candidate), _flatten(serving)
    changes: list[ConfigChange] = []
    for key in sorted(found.keys() | expected.keys()):
        if _matches(key, _HARMLESS):
            continue
        now, before = found.get(key), expected.get(key)
        # repr: NaN differs from itself.
        if now == before or repr(now) == repr(before):
            continue
        changes.append(ConfigChange(key, _show(before), _show(now), _matches(key, _ARCHITECTURE)))
    return tuple(changes)


def compare_assets(candidate: Mapping[str, Digest], serving: Mapping[str, Digest]) -> tuple[str, ...]:
    """Names of files that were added, removed or changed, sorted; config.json is compared by key."""
    names = (candidate.keys() | serving.keys()) - {CONFIG_FILE}
    return tuple(sorted(name for name in names if candidate.get(name) != serving.get(name)))


def is_tokenizer_file(name: str) -> bool:
    """Whether a change of the file may change how text becomes tokens."""
    return name in TOKENIZER_FILES


def _flatten(config: Mapping[str, object]) -> dict[str, object]:
    """Nested objects as dotted keys, without nulls, rotary settings spelled the old way."""
    flat: dict[str, object] = {}
    pending: list[tuple[str, object]] = list(config.items())
    while pending:
        key, value = pending.pop()
        if isinstance(value, Mapping):
            pending.extend((f"{key}.{inner}", part) for inner, part in value.items())
        elif value is not None:
            name = _old_spelling(key)
            if not (name.endswith("rope_scaling.rope_type") and value == "default"):
                flat[name] = value
    return flat


def _old_spelling(key: str) -> str:
    # transformers 5 writes `rope_parameters` where 4 wrote `rope_theta` and `rope_scaling`.
    head, separator, tail = key.rpartition("rope_parameters.")
    if separator:
        return head + (tail if tail in {"rope_theta", "partial_rotary_factor"} else f"rope_scaling.{tail}")
    head, separator, tail = key.rpartition("rope_scaling.")
    if separator and tail == "type":
        return f"{head}rope_scaling.rope_type"
    return key


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(part, pattern) for part in key.split(".") for pattern in patterns)


def _show(value: object) -> str:
    return _ABSENT if value is None else repr(value)[:_SHOWN_CHARS]
