"""What the engine's GPU tests share: versions on the device, and what must come out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from inferd.engine.protocol import SamplingParams
from inferd.engine.transformers_engine import TransformersEngine
from tests.unit.engine.checkpoints import make_checkpoint, read_tensors, update_low_rank
from tests.unit.engine.sessions import Answer, EngineSession

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICE = torch.device("cuda", 0)
NEW_TOKENS = 24
GREEDY = SamplingParams(NEW_TOKENS, temperature=0, ignore_eos=True)


@contextmanager
def opened() -> Iterator[EngineSession]:
    """Opens engines; checks and stops them at the end."""
    session = EngineSession()
    try:
        yield session
    finally:
        session.close()


def float32_folder(folder: Path) -> Path:
    """The real model in float32 if CHANGEOVER_TEST_MODEL_F32 names its folder, else a tiny one."""
    named = os.environ.get("CHANGEOVER_TEST_MODEL_F32")
    return Path(named) if named else make_checkpoint(folder)


def bfloat16_folder(folder: Path) -> Path:
    """The real model in bfloat16 if CHANGEOVER_TEST_MODEL_BF16 names its folder, else a tiny one."""
    named = os.environ.get("CHANGEOVER_TEST_MODEL_BF16")
    return Path(named) if named else make_checkpoint(folder, dtype=torch.bfloat16)


def on_device(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the GPU."""
    return {name: tensor.to(DEVICE) for name, tensor in tensors.items()}


def versions(folder: Path, count: int) -> list[dict[str, torch.Tensor]]:
    """The checkpoint and others of its layout that answer otherwise, on the GPU."""
    first = read_tensors(folder)
    return [on_device(update_low_rank(first, seed=seed) if seed else first) for seed in range(count)]


def serve(
    session: EngineSession,
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    is_warm: bool = True,
    **settings: int,
) -> TransformersEngine:
    """An engine with a version in slot 0, for few sequences unless told otherwise: each size is captured."""
    engine = session.open(**{"max_sequences": 8} | settings)
    session.build(engine, 0, tensors, folder, "0")
    if is_warm:
        engine.warm(0)
    return engine


def generated(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    prompts: Sequence[Sequence[int]],
    tokens: int = NEW_TOKENS,
) -> list[list[int]]:
    """What `transformers` generates greedily on the same GPU."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(DEVICE).eval()
    model.load_state_dict(dict(tensors), strict=False)
    answers: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=DEVICE)
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        answers.append(output[0, ids.shape[1] :].tolist())
    return answers


def prompts_of(count: int, *, vocabulary: int = 257, shortest: int = 1, longest: int = 70) -> list[list[int]]:
    """Random prompts, no two of the same length where there are enough lengths."""
    generator = torch.Generator().manual_seed(count)
    lengths = [shortest + number * (longest - shortest) // max(1, count - 1) for number in range(count)]
    return [torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def answers_of(
    session: EngineSession,
    engine: TransformersEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    slot: int = 0,
) -> list[list[int]]:
    """Tokens of all prompts, submitted together."""
    answers: list[Answer] = [session.submit(engine, prompt, params, slot)[1] for prompt in prompts]
    for answer in answers:
        last = answer.wait()
        if last.error:
            raise RuntimeError(last.error)
    return [answer.tokens for answer in answers]
