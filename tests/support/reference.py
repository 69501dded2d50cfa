"""What `transformers` itself answers, to hold the engine's answers against."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@cache
def greedy_tokens(folder: Path, prompts: tuple[str, ...], max_tokens: int) -> dict[str, tuple[int, ...]]:
    """What `transformers` generates in float32, by prompt: at most `max_tokens` ids, the end token with them.

    Made once per process, of a folder that does not change: the real model takes a minute.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers: dict[str, tuple[int, ...]] = {}
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
            )
        answers[prompt] = tuple(output[0, ids.shape[1] :].tolist())
    return answers


def greedy_texts(folder: Path, prompts: Sequence[str], max_tokens: int) -> dict[str, str]:
    """The same as texts without an end token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = greedy_tokens(folder, tuple(prompts), max_tokens)
    return {prompt: tokenizer.decode(list(ids), skip_special_tokens=True) for prompt, ids in answers.items()}
