"""Small random Llamas on disk, and the versions derived from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from loaderd.seal.create import seal_directory
from tests.unit.engine.checkpoints import CHAT_TEMPLATE, update_low_rank

VOCABULARY = 257
POSITIONS = 32_768
"""Enough that a stream with `ignore_eos` outlives any test that holds it."""

Edit = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character, each a visible one, so that a text says exactly which tokens it is of."""
    characters = ["\n", *map(chr, range(0x20, 0x7F)), *map(chr, range(0x4E00, 0x4E00 + 160))]
    vocabulary = {"<end>": 0} | {char: number for number, char in enumerate(characters, start=1)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(
    folder: Path,
    *,
    hidden: int = 48,
    intermediate: int = 96,
    layers: int = 3,
    seed: int = 0,
    is_sharded: bool = False,
) -> Path:
    """A float32 Llama in `folder`, unsealed; in two files with an index if it `is_sharded`."""
    heads = hidden // 8
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3 or 1,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        initializer_range=0.3 if hidden < 128 else 0.02,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=nbytes * 2 // 3 if is_sharded else nbytes + 64)
    make_tokenizer().save_pretrained(folder)
    return folder


def derive(base: Path, target: Path, edit: Edit, *, is_sealed: bool = True) -> Path:
    """`base` with some tensors edited, file by file, in the new folder `target`."""
    target.mkdir()
    for path in sorted(base.iterdir()):
        if path.name == "seal.json":
            continue
        if path.suffix == ".safetensors":
            tensors = load_file(path)
            save_file({**tensors, **edit(tensors)}, target / path.name, metadata={"format": "pt"})
        else:
            (target / path.name).write_bytes(path.read_bytes())
    if is_sealed:
        seal_directory(target)
    return target


def low_rank(seed: int) -> Edit:
    """An update after which every answer is another one."""
    return lambda tensors: update_low_rank(tensors, seed=seed)


def everything_scaled(factor: float) -> Edit:
    """An update that leaves no tensor as it was, so that none is shared."""
    return lambda tensors: {name: tensor * factor for name, tensor in tensors.items()}


def not_a_number(victim: str) -> Edit:
    """NaN in one element: the file is sound, the weights are not."""

    def edit(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        if victim not in tensors:
            return {}
        broken = tensors[victim].clone()
        broken[1, 2] = float("nan")
        return {victim: broken}

    return edit


def flip_byte(folder: Path, tensor: str) -> str:
    """Flip a bit in the middle of a tensor's bytes; returns the name of the file."""
    for path in sorted(folder.glob("*.safetensors")):
        raw = bytearray(path.read_bytes())
        header_bytes = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + header_bytes])
        if tensor in header:
            begin, end = header[tensor]["data_offsets"]
            raw[8 + header_bytes + (begin + end) // 2] ^= 1
            path.write_bytes(raw)
            return path.name
    raise KeyError(tensor)


def change_config(folder: Path, **changes: object) -> None:
    """Overwrite keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
