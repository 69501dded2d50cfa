"""What each version must answer, computed by transformers itself in float32, without changeover."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from demo.evidence import Endpoint, Prompt


def reference_answers(
    folder: Path, prompts: Sequence[Prompt], max_tokens: int, cache: Path, device: str
) -> dict[str, str]:
    """Prompt key → greedy text of the checkpoint in `folder` on `device` (as torch names it); read from
    `cache` if made of the same."""
    import transformers

    asked = {
        "transformers": transformers.__version__,
        "seal": (folder / "seal.json").read_text(),
        "max_tokens": max_tokens,
        "prompts": [[prompt.key, prompt.endpoint.value, prompt.text] for prompt in prompts],
    }
    if cache.is_file():
        cached = json.loads(cache.read_text())
        if cached["asked"] == asked:
            texts: dict[str, str] = cached["texts"]
            return texts
    texts = _compute(folder, prompts, max_tokens, device)
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_suffix(".part")
    partial.write_text(json.dumps({"asked": asked, "texts": texts}))
    partial.replace(cache)
    return texts


def _compute(folder: Path, prompts: Sequence[Prompt], max_tokens: int, device: str) -> dict[str, str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    texts = {}
    for prompt in prompts:
        if prompt.endpoint is Endpoint.CHAT:
            inputs = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt.text}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
        else:
            inputs = tokenizer(prompt.text, return_tensors="pt")
        with torch.inference_mode():
            tokens = model.generate(**inputs.to(device), max_new_tokens=max_tokens, do_sample=False)
        new = tokens[0, inputs["input_ids"].shape[1] :]
        texts[prompt.key] = tokenizer.decode(
            new, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    return texts
