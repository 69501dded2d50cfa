"""RMS norms of a model in one kernel each on a CUDA device, where `transformers` launches seven.

At decoding sizes a norm moves a few kilobytes, so launches are all that it costs.  Whether a module is
the norm that the kernel computes is not taken from its name: it is asked for its answer.  float32 models
keep theirs: they are served for the very numbers of the model code, and the kernel sums in another order.
"""

from __future__ import annotations

import torch

_ROWS = 3
_LARGEST = 16_384  # elements of a row that one program holds


class FusedNorm:
    """Stands for the `forward` of `module`; the weight stays where it is, and is looked up there."""

    def __init__(self, module: torch.nn.Module, epsilon: float) -> None:
        self._module = module
        self.epsilon = epsilon

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`hidden_states` [..., width] over its root mean square, times the weight, in the same dtype."""
        from inferd.engine.norm_kernel import normalise  # needs Triton, which only CUDA builds bring

        weight = self._module._parameters["weight"]
        if weight is None or not hidden_states.is_contiguous():
            return type(self._module).forward(self._module, hidden_states)  # type: ignore[no-any-return]
        return normalise(hidden_states, weight, self.epsilon)


@torch.inference_mode()
def fuse_norms(model: torch.nn.Module) -> int:
    """Let the RMS norms of `model`, whose weights lie on a CUDA device, run as one kernel; how many do."""
    fused = 0
    for module in model.modules():
        epsilon = getattr(module, "variance_epsilon", None)
        weight = module._parameters.get("weight")
        if (
            not isinstance(epsilon, float)
            or weight is None
            or weight.dim() != 1
            or len(module._parameters) != 1
        ):
            continue
        norm = FusedNorm(module, epsilon)
        if weight.dtype != torch.float32 and weight.shape[0] <= _LARGEST and _is_alike(module, norm, weight):
            module.forward = norm
            fused += 1
    return fused


def _is_alike(module: torch.nn.Module, norm: FusedNorm, weight: torch.Tensor) -> bool:
    """Whether both answer the same for rows that are large, small and in between, but for rounding."""
    width = weight.shape[0]
    wave = torch.arange(_ROWS * width, device=weight.device, dtype=torch.float32).sin().view(_ROWS, width)
    # The last so small that epsilon counts as much as the mean square.
    size = torch.tensor([[30.0], [1.0], [norm.epsilon**0.5]], device=weight.device)
    rows = (wave * size).to(weight.dtype)
    wanted, found = module(rows), norm(rows)
    if wanted.dtype != found.dtype:
        return False
    tolerance = 4 * torch.finfo(weight.dtype).eps
    return bool(torch.isclose(wanted, found, rtol=tolerance, atol=0, equal_nan=True).all())
