"""Configs compared: what changes the computation, what is worth a warning, what is only noise."""

from __future__ import annotations

import pytest

from loaderd.compatibility import compare_assets, compare_configs
from shared.digest import file_digest

LLAMA: dict[str, object] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "rope_theta": 100000,
    "rope_scaling": None, "rms_norm_eps": 1e-05, "eos_token_id": 2, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
}  # fmt: skip


def kinds(changes: dict[str, object], base: dict[str, object] = LLAMA) -> dict[str, bool]:
    found = {key: value for key, value in {**base, **changes}.items() if value is not ...}
    return {change.key: change.is_architecture for change in compare_configs(found, base)}


ARCHITECTURE: dict[str, object] = {
    "model_type": "qwen2", "hidden_size": 577, "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "vocab_size": 49152, "intermediate_size": 1, "head_dim": 64, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "hidden_act": "gelu", "sliding_window": 4096, "tie_word_embeddings": True,
    "attention_bias": True, "mlp_bias": True, "layer_types": ["full_attention"], "num_local_experts": 8,
    "quantization_config": {"bits": 4}, "final_logit_softcapping": 30.0, "partial_rotary_factor": 0.5,
    "kv_lora_rank": 512, "q_norm": True, "n_routed_experts": 64, "embedding_multiplier": 12.0,
}  # fmt: skip


@pytest.mark.parametrize("key", ARCHITECTURE)
def test_what_changes_the_computation_is_architecture(key: str) -> None:
    changes = kinds({key: ARCHITECTURE[key]})
    assert changes
    assert all(changes.values())


@pytest.mark.parametrize(
    "key", ["eos_token_id", "pad_token_id", "max_position_embeddings", "attention_dropout", "my_note"]
)
def test_other_keys_are_told(key: str) -> None:
    assert kinds({key: 7}) == {key: False}


@pytest.mark.parametrize(
    "key", ["_name_or_path", "transformers_version", "_commit_hash", "use_cache", "torch_dtype", "dtype"]
)
def test_noise_is_not_told(key: str) -> None:
    assert kinds({key: "other"}) == {}


def test_nested_keys_count_by_any_part_of_their_path() -> None:
    base: dict[str, object] = {"text_config": {"hidden_size": 4, "note": 1}, "rope_scaling": {"factor": 2.0}}
    found: dict[str, object] = {"text_config": {"hidden_size": 5, "note": 2}, "rope_scaling": {"factor": 4.0}}
    assert {c.key: c.is_architecture for c in compare_configs(found, base)} == {
        "rope_scaling.factor": True, "text_config.hidden_size": True, "text_config.note": False,
    }  # fmt: skip


def test_null_is_absent_and_numbers_compare_by_value() -> None:
    assert kinds({"rope_scaling": ..., "head_dim": None, "rope_theta": 100000.0}) == {}
    nan: dict[str, object] = {"x": float("nan")}
    assert compare_configs(dict(nan), {"x": float("nan")}) == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"rope_theta": 1e4, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"text_config": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            {"text_config": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}},
        ),
    ],
)
def test_both_spellings_of_rotary_settings_are_one(old: dict[str, object], new: dict[str, object]) -> None:
    assert compare_configs(old, new) == ()
    assert compare_configs(new, old) == ()


def test_other_rotary_settings_differ_in_either_spelling() -> None:
    changes = compare_configs({"rope_parameters": {"rope_theta": 1e6}}, {"rope_theta": 1e4})
    assert [str(change) for change in changes] == [
        "config.json: rope_theta is 1000000.0, the serving version's is 10000.0"
    ]


def test_a_deep_config_is_compared_without_recursion() -> None:
    deep: dict[str, object] = {"x": 1}
    for _ in range(5000):
        deep = {"d": deep}
    assert compare_configs(deep, {}) != ()


def test_files_are_compared_by_digest_and_config_by_key() -> None:
    one, two = file_digest(b"1"), file_digest(b"2")
    before = {"config.json": one, "tokenizer.json": one, "merges.txt": one, "vocab.json": one}
    after = {"config.json": two, "tokenizer.json": one, "merges.txt": two, "added_tokens.json": one}
    assert compare_assets(after, before) == ("added_tokens.json", "merges.txt", "vocab.json")
