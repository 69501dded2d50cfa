"""Checkpoints for engine tests: a tiny random Llama made on the spot, and changes to one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shared.ids import Digest, VersionRef, VersionTag

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('role') }}{% endif %}"
    "{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)

NEW_TOKENS = 16
"""What a test of equality with `transformers` has each prompt answered with."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at",
    "The quick brown fox",
    "Dear customer, we are sorry",
    "In 1969 the first people",
    "SELECT name FROM users WHERE",
    "A list of fruits: apples,",
    "Roses are red,",
    "To be or not to be",
    "import numpy as np\n",
    "The largest planet is",
    "Q: What is 2 + 2?\nA:",
    "My favourite season is",
    "<html><head><title>",
    "Grüße aus München, heute",
    "She opened the door and",
    "The theory of relativity says that " * 6,
    "The theory of relativity says that " * 6 + "light",
    "Yes",
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level without merges: a token per byte, and an end token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0} | {char: number for number, char in enumerate(alphabet, start=1)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_checkpoint(
    folder: Path, *, dtype: torch.dtype = torch.float32, is_tied: bool = True, seed: int = 0
) -> Path:
    """A Llama of 3 layers with grouped heads in `folder`."""
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=is_tied,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(path))
    return tensors


def update_low_rank(
    tensors: Mapping[str, torch.Tensor], *, seed: int = 1, scale: float = 0.5
) -> dict[str, torch.Tensor]:
    """Another version of the same layout: the attention outputs get a random update of rank 2, of
    `scale` times their own size."""
    generator = torch.Generator().manual_seed(seed)
    changed = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("o_proj.weight"):
            left = torch.randn(tensor.shape[0], 2, generator=generator)
            right = torch.randn(2, tensor.shape[1], generator=generator)
            update = left @ right
            update *= scale * tensor.float().norm() / update.norm()
            changed[name] = (tensor.float() + update).to(tensor.dtype)
    return changed


def tag_of(version: str, fill: str = "0") -> VersionTag:
    """A tag with a digest that is `fill` all over."""
    return VersionTag(VersionRef("model", version), Digest("sha256:" + fill * 64))
