"""Building a version over mapped tensors: nothing is copied, and what does not fit is refused by name."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from inferd.engine.model import _refuse_meta, build_model
from inferd.engine.protocol import SamplingParams
from shared.errors import InvalidRequest

from .checkpoints import make_checkpoint, make_tokenizer, read_tensors, tag_of
from .sessions import EngineSession

Tensors = dict[str, torch.Tensor]
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def with_config(folder: Path, to: Path, **changes: object) -> Path:
    """A copy of a checkpoint's assets with another config."""
    shutil.copytree(folder, to)
    path = to / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return to


def test_parameters_are_the_mapped_tensors(tiny_folder: Path) -> None:
    tensors = read_tensors(tiny_folder)
    model = build_model(tag_of("v1"), tensors, tiny_folder)
    parameters = dict(model.module.named_parameters())
    assert parameters.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert parameters[name].data_ptr() == tensor.data_ptr()
        assert not parameters[name].requires_grad


def test_tied_weights_stay_tied(tiny_folder: Path) -> None:
    model = build_model(tag_of("v1"), read_tensors(tiny_folder), tiny_folder)
    assert model.module.get_parameter(HEAD) is model.module.get_parameter(EMBEDDING)


def test_derived_buffers_are_made_for_each_version(tiny_folder: Path) -> None:
    one, other = (build_model(tag_of(v), read_tensors(tiny_folder), tiny_folder) for v in ("v1", "v2"))
    frequencies = [m.module.get_buffer("model.rotary_emb.inv_freq") for m in (one, other)]
    assert frequencies[0].data_ptr() != frequencies[1].data_ptr()
    wanted = 1.0 / (10000.0 ** (torch.arange(0, 8, 2, dtype=torch.float32) / 8))
    for found in frequencies:
        assert torch.equal(found, wanted)


def test_the_weights_are_let_go(tiny_folder: Path) -> None:
    model = build_model(tag_of("v1"), read_tensors(tiny_folder), tiny_folder)
    model.forget_weights()
    assert not list(model.module.parameters())
    assert not list(model.module.buffers())


def test_the_default_dtype_of_the_process_is_not_touched(
    tiny_bf16_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.dtype] = []
    original = torch.set_default_dtype

    def watch(dtype: torch.dtype) -> None:
        asked.append(dtype)
        original(dtype)

    monkeypatch.setattr(torch, "set_default_dtype", watch)
    model = build_model(tag_of("v1"), read_tensors(tiny_bf16_folder), tiny_bf16_folder)
    assert set(asked) <= {torch.float32}
    assert model.module.get_parameter(EMBEDDING).dtype is torch.bfloat16


def test_nothing_is_asked_of_the_network(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        asked.append(arguments)  # the error alone may be taken for that of a machine without a network
        raise OSError("a socket was opened")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    build_model(tag_of("v1"), read_tensors(tiny_folder), tiny_folder)
    assert asked == []


def test_a_tensor_without_a_value_is_named(tiny_folder: Path) -> None:
    model = build_model(tag_of("v1"), read_tensors(tiny_folder), tiny_folder)
    model.module.get_submodule("model.norm").scale = torch.ones(2, device="meta")
    with pytest.raises(InvalidRequest, match=r"model\.norm\.scale has no value"):
        _refuse_meta(model.module)


def test_a_buffer_that_nothing_derives_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_init_weights", lambda self, module: None)
    with pytest.raises(InvalidRequest, match="does not say how its buffer 'inv_freq' is derived"):
        build_model(tag_of("v1"), read_tensors(tiny_folder), tiny_folder)


def lack(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def surplus(tensors: Tensors) -> None:
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)


def misshapen(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.zeros(49)


def retyped(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()


def untied(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING] + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lack, "lacks 'model.layers.1.mlp.up_proj.weight'"),
        (surplus, "no place for 'model.layers.9.mlp.up_proj.weight'"),
        (misshapen, r"'model.norm.weight': expected shape \(48,\), found \(49,\)"),
        (retyped, "'model.norm.weight': expected float32, found float16"),
        (untied, "lm_head.weight and model.embed_tokens.weight are tied"),
        (dict.clear, "0 devices"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tiny_folder: Path, change: Callable[[Tensors], None], message: str
) -> None:
    tensors = read_tensors(tiny_folder)
    change(tensors)
    with pytest.raises(InvalidRequest, match=message):
        build_model(tag_of("v1"), tensors, tiny_folder)


def test_a_tied_weight_may_be_stored_twice_or_under_the_other_name(tiny_folder: Path) -> None:
    tensors = read_tensors(tiny_folder)
    twice = tensors | {HEAD: tensors[EMBEDDING].clone()}
    build_model(tag_of("v1"), twice, tiny_folder)
    other = {HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}
    model = build_model(tag_of("v1"), other, tiny_folder)
    assert model.module.get_parameter(EMBEDDING).data_ptr() == tensors[EMBEDDING].data_ptr()


def test_an_untied_model_needs_its_own_head(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "untied", is_tied=False)
    tensors = read_tensors(folder)
    model = build_model(tag_of("v1"), tensors, folder)
    assert model.module.get_parameter(HEAD).data_ptr() == tensors[HEAD].data_ptr()
    del tensors[HEAD]
    with pytest.raises(InvalidRequest, match=r"lacks 'lm_head.weight'"):
        build_model(tag_of("v1"), tensors, folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "asks for bfloat16, the checkpoint holds float32"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
        (
            {"model_type": "no-such-model", "auto_map": {"AutoConfig": "evil.Evil"}},
            "config.json cannot be used",
        ),
        ({"hidden_size": 60}, "expected shape"),
        ({"hidden_size": 64}, "config.json cannot be used"),
        ({"num_hidden_layers": 4}, "lacks"),
        ({"num_hidden_layers": 2}, "no place for"),
        (
            {"rope_parameters": {"rope_type": "nonsense", "rope_theta": 1.0}},
            "transformers cannot make|cannot be used",
        ),
    ],
)
def test_configs_that_cannot_be_served_are_refused(
    tiny_folder: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = with_config(tiny_folder, tmp_path / "changed", **changes)
    with pytest.raises(InvalidRequest, match=message):
        build_model(tag_of("v1"), read_tensors(tiny_folder), folder)


def test_an_old_rotary_buffer_in_the_checkpoint_is_not_used_silently(tiny_folder: Path) -> None:
    tensors = read_tensors(tiny_folder)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    try:
        model = build_model(tag_of("v1"), tensors, tiny_folder)
    except InvalidRequest as error:
        assert "inv_freq" in error.message  # noqa: PT017 - either is right, depending on the model code
    else:
        assert model.module.get_buffer("model.rotary_emb.inv_freq").count_nonzero() == 4


def test_a_missing_or_broken_tokenizer_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    folder = with_config(tiny_folder, tmp_path / "changed")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidRequest, match="tokenizer"):
        build_model(tag_of("v1"), read_tensors(tiny_folder), folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InvalidRequest, match="tokenizer"):
        build_model(tag_of("v1"), read_tensors(tiny_folder), folder)


SIZES = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = SIZES | {"intermediate_size": 64, "eos_token_id": 0, "bos_token_id": None, "pad_token_id": 0}


def save(model: torch.nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)  # type: ignore[operator]
    make_tokenizer().save_pretrained(folder)
    return folder


def test_other_decoders_run_by_the_same_attention(session: EngineSession, tmp_path: Path) -> None:
    torch.manual_seed(0)
    models = {
        "qwen3": Qwen3ForCausalLM(
            Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8, max_position_embeddings=128)
        ),
        "gemma": GemmaForCausalLM(
            GemmaConfig(**COMMON, num_key_value_heads=1, head_dim=16, max_position_embeddings=128)
        ),
        "phi3": Phi3ForCausalLM(Phi3Config(**COMMON, num_key_value_heads=4, max_position_embeddings=128)),
    }
    for name, model in models.items():
        folder = save(model.eval(), tmp_path / name)
        engine = session.open(folder)
        engine.warm(0)
        _, answer = session.submit(engine, list(range(1, 20)), SamplingParams(8, temperature=0))
        answer.wait()
        ids = torch.arange(1, 20)[None]
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        assert answer.tokens == wanted[0, 19:].tolist(), name


def test_attention_that_the_cache_cannot_serve_is_refused(tmp_path: Path) -> None:
    window = MistralConfig(
        **COMMON, num_key_value_heads=2, head_dim=8, max_position_embeddings=128, sliding_window=32
    )
    folder = save(MistralForCausalLM(window), tmp_path / "window")
    tensors = read_tensors(folder)
    with pytest.raises(InvalidRequest, match="sliding window of 32"):
        build_model(tag_of("v1"), tensors, folder)
    assert build_model(tag_of("v1"), tensors, folder, longest=32).max_positions == 128
    bloom = BloomConfig(vocab_size=257, hidden_size=32, n_layer=2, n_head=4)
    folder = save(BloomForCausalLM(bloom), tmp_path / "bloom")
    with pytest.raises(InvalidRequest):
        build_model(tag_of("v1"), read_tensors(folder), folder)
