"""Making checkpoint folders: GGUF to safetensors, float32 to bfloat16, and a tiny Llama from nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from demo.model_source import ModelUnavailableError

_SHARD_F32 = "240MB"  # three shards
_QUESTION = "What is the capital of France?"
_EXPECTED = "The capital of France is Paris."
_END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

transformers_logging.disable_progress_bar()


def convert_gguf(gguf: Path, target: Path) -> None:
    """Write the GGUF file as a float32 safetensors checkpoint; raises ModelUnavailableError if the result
    does not answer a simple question as the original does."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # What is in memory is dequantised; without these two, saving would claim that it is GGUF.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target, max_shard_size=_SHARD_F32)
    tokenizer.save_pretrained(target)
    del model
    _make_readable(target)
    _check(target)


def _check(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": _QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    answer = tokenizer.decode(tokens, skip_special_tokens=True)
    if answer != _EXPECTED:
        raise ModelUnavailableError(f"the converted model answers {answer!r}, expected {_EXPECTED!r}")


def cast_checkpoint(source: Path, target: Path) -> None:
    """Write `source` again with every floating tensor in bfloat16."""
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
            save_file(tensors, target / path.name, metadata={"format": "pt"})
        elif path.name == "config.json":
            (target / path.name).write_text(path.read_text().replace('"float32"', '"bfloat16"'))
        elif path.name == "model.safetensors.index.json":
            index = json.loads(path.read_text())
            index["metadata"]["total_size"] //= 2
            (target / path.name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
        else:
            shutil.copyfile(path, target / path.name)
    _make_readable(target)


def generate_tiny(target: Path) -> None:
    """Write a Llama of about 1 MB with random weights and a byte-level tokenizer, the same each time."""
    tokenizer = _byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    save_random_llama(config, target, seed=1)
    tokenizer.save_pretrained(target)
    _make_readable(target)


def save_random_llama(config: LlamaConfig, target: Path, seed: int) -> None:
    """Write a Llama with random weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Weights of the usual scale would make a model this small repeat one token for ever.
        config.initializer_range = 0.2
        model = LlamaForCausalLM(config)
    model.save_pretrained(target, max_shard_size="400KB")


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    # ASCII alone: random weights would string other bytes together to what is no UTF-8.
    alphabet = "".join(chr(code) for code in range(33, 127)) + "ĠĊ"  # as ByteLevel spells space and line end
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END)
    fast.chat_template = _TEMPLATE
    return fast


def _make_readable(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes 0600
