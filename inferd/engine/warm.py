"""Trial prompts for a version that is about to serve: does it compute at all, and numbers only?"""

from __future__ import annotations

from typing import NoReturn

import torch

from inferd.engine.blocks import PrefixKey
from inferd.engine.forward import run_forward
from inferd.engine.kv_cache import KvCache
from inferd.engine.model import VersionModel
from inferd.engine.scheduler import Chunk, Sequence
from inferd.engine.transfers import fetch
from shared.errors import WarmupFailed

_TEXTS = ("The capital of France is", "1, 2, 3, 4,", "def add(a, b):")
_NEW_TOKENS = 8
_BLOCK_TOKENS = 16
_SCAN_ELEMENTS = 1 << 22


def probe_model(model: VersionModel) -> None:
    """Run one token.  Raises InvalidRequest where the model's attention is not one that the paged cache
    serves, or does not write what its config says."""
    _Trial(model, [0]).run()


def warm_model(model: VersionModel) -> tuple[int, ...]:
    """Run trial prompts greedily on a small cache of their own, then check every weight; the first token
    of each answer.  Raises WarmupFailed on NaN or Inf, naming where it was first seen."""
    first: list[int] = []
    for prompt in _prompts(model):
        trial = _Trial(model, prompt)
        chosen = [trial.step() for _ in range(min(_NEW_TOKENS, model.max_positions - len(prompt)))]
        first += chosen[:1]
    # Last, because most broken versions show at once, and a row that no prompt used only here.
    _check_weights(model.module)
    return tuple(first)


def _prompts(model: VersionModel) -> list[list[int]]:
    texts = [model.tokenizer.encode(text, add_special_tokens=True) for text in _TEXTS]
    # And one that spans blocks and the vocabulary, whatever the tokenizer makes of the texts.
    spread = [number * 7919 % model.vocabulary for number in range(3 * _BLOCK_TOKENS)]
    room = max(1, model.max_positions - 1)
    prompts = [[token for token in tokens if token < model.vocabulary] for tokens in (*texts, spread)]
    return [tokens[:room] for tokens in prompts if tokens]


class _Trial:
    """One prompt on a cache of its own."""

    def __init__(self, model: VersionModel, prompt: list[int]) -> None:
        blocks = -(-(len(prompt) + _NEW_TOKENS) // _BLOCK_TOKENS)
        self._model = model
        self._cache = KvCache(model.geometry, blocks, _BLOCK_TOKENS)
        root = PrefixKey.root(model.tag.digest)
        self._sequence = Sequence(0, 0, root, list(prompt), _NEW_TOKENS, blocks=list(range(blocks)))

    def run(self) -> torch.Tensor:
        """Compute what is pending; the logits [vocabulary] of the next token."""
        sequence = self._sequence
        chunk = Chunk(sequence, sequence.computed, sequence.pending, is_last=True)
        return run_forward(self._model, self._cache, [chunk], decodes=int(chunk.count == 1))[0]

    def step(self) -> int:
        """Compute what is pending and append the likeliest token, which is returned."""
        logits = self.run()
        is_sound, best = fetch(torch.isfinite(logits).all(), logits.argmax())
        if not bool(is_sound):
            self._blame()
        token = int(best)
        self._sequence.computed = len(self._sequence.tokens)
        self._sequence.tokens.append(token)
        return token

    def _blame(self) -> NoReturn:
        """Run the chunk again and raise WarmupFailed for the first module that put out NaN or Inf."""
        seen: list[str] = []
        names = {module: name for name, module in self._model.module.named_modules()}

        def look(module: torch.nn.Module, _: object, output: object) -> None:
            if not seen and isinstance(output, torch.Tensor) and not bool(torch.isfinite(output).all()):
                seen.append(names[module])

        # Modules return from the inside out, so the first to return is the innermost.
        hooks = [module.register_forward_hook(look) for module in names]
        try:
            self.run()
        finally:
            for hook in hooks:
                hook.remove()
        module = seen[0] if seen else ""
        where, tensor = module or "the logits", ""
        for leaf, weight in self._model.module.get_submodule(module).named_parameters(recurse=False):
            at = _first_bad(weight)
            if at is not None:
                tensor = f"{module}.{leaf}"
                where += f", whose {leaf} holds {_value(weight, at)} at element {at}"
                break
        raise WarmupFailed(
            f"NaN or Inf after {len(self._sequence.tokens)} tokens of a trial prompt, first in {where}",
            module=module,
            tensor=tensor,
        )


def _check_weights(module: torch.nn.Module) -> None:
    weights = [(name, weight.detach()) for name, weight in module.named_parameters() if weight.numel()]
    # NaN and Inf survive the smallest and largest: one pass over each tensor without a temporary, and
    # one wait for all of them.
    ends = [end.double() for _, weight in weights for end in torch.aminmax(weight)]
    (are_sound,) = fetch(torch.isfinite(torch.stack(ends)).view(-1, 2).all(1))
    for (name, weight), is_sound in zip(weights, are_sound.tolist(), strict=True):
        at = None if is_sound else _first_bad(weight)
        if at is not None:
            raise WarmupFailed(
                f"tensor {name!r} holds {_value(weight, at)} at element {at}", module="", tensor=name
            )


def _first_bad(weight: torch.Tensor) -> int | None:
    """Index in the flattened tensor of its first NaN or Inf."""
    flat = weight.detach().reshape(-1)
    for start in range(0, flat.numel(), _SCAN_ELEMENTS):
        # In pieces, so that a large tensor needs no large temporary.
        part = flat[start : start + _SCAN_ELEMENTS]
        is_bad = ~torch.isfinite(part)
        if bool(is_bad.any()):
            return start + int(is_bad.to(torch.uint8).argmax())
    return None


def _value(weight: torch.Tensor, at: int) -> float:
    return float(weight.detach().reshape(-1)[at])
