"""`VersionModel`: model code from `transformers` over tensors that are mapped, not copied.

The module is made on the meta device, so it never owns weights.  Every parameter is then *assigned* a
mapped tensor; what a checkpoint does not store (rotary frequencies) is computed anew for each version.
Code that comes with a checkpoint is never run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM

from inferd.engine.attention import ATTENTION
from inferd.engine.fused_norms import fuse_norms
from inferd.engine.kv_cache import KvGeometry
from inferd.engine.tokenizer import VersionTokenizer
from shared.errors import InvalidRequest
from shared.ids import VersionTag


@dataclass(frozen=True, slots=True)
class VersionModel:
    """A version that is ready to run."""

    tag: VersionTag
    module: torch.nn.Module
    tokenizer: VersionTokenizer
    geometry: KvGeometry
    heads: int  # of queries
    vocabulary: int
    max_positions: int
    end_tokens: frozenset[int]

    def forget_weights(self) -> None:
        """Let go of every tensor, so that the mapping can go even if something still holds the module."""
        _forget_weights(self.module)


def build_model(
    tag: VersionTag, tensors: Mapping[str, torch.Tensor], assets: Path, longest: int | None = None
) -> VersionModel:
    """The model that `assets/config.json` describes, over `tensors`, for sequences of up to `longest`
    tokens.  Touches no global state of torch, so it may run beside steps, and never writes to a tensor of
    `tensors`, whose memory may be read-only.  Raises InvalidRequest where config, code and tensors do not
    fit."""
    config = _read_config(assets, longest)
    dtype, device = _dtype_and_device(config, tensors)
    _refuse_tf32(dtype, device)
    module = _make_module(config)
    try:
        return _complete(tag, config, module, tensors, assets, dtype, device)
    except BaseException:
        _forget_weights(module)
        raise


def _complete(
    tag: VersionTag,
    config: Any,
    module: Any,
    tensors: Mapping[str, torch.Tensor],
    assets: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> VersionModel:
    """The model of a module whose weights are still to be assigned."""
    config.dtype = dtype
    tied = {target: source for target, source in module.all_tied_weights_keys.items() if target != source}
    matched = _match(module, dict(tensors), tied, dtype)
    _compute_buffers(module, device)  # first: the initialisation that does it fills weights, too
    _assign(module, matched, tied)
    _refuse_meta(module)
    module.eval()
    if device.type == "cuda":
        fuse_norms(module)
    heads = config.num_attention_heads
    return VersionModel(
        tag=tag,
        module=module,
        tokenizer=VersionTokenizer.of(assets),
        geometry=KvGeometry(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=dtype,
            device=device,
        ),
        heads=heads,
        vocabulary=config.vocab_size,
        max_positions=config.max_position_embeddings,
        end_tokens=_end_tokens(config, assets),
    )


def _forget_weights(module: torch.nn.Module) -> None:
    for each in module.modules():
        each._parameters.clear()
        each._buffers.clear()


def _read_config(assets: Path, longest: int | None) -> Any:
    try:
        config = AutoConfig.from_pretrained(str(assets), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise InvalidRequest(f"config.json cannot be used: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise InvalidRequest("config.json asks for quantised weights, which this engine does not run")
    if config.is_encoder_decoder or getattr(config, "vision_config", None) is not None:
        raise InvalidRequest(f"{config.model_type} is not a decoder of text alone")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise InvalidRequest(f"layers of type {', '.join(sorted(kinds))} are not supported")
    if getattr(config, "attn_logit_softcapping", None):
        raise InvalidRequest("attention with softcap is not supported")
    needed = (
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_size",
        "vocab_size",
        "max_position_embeddings",
    )
    missing = [name for name in needed if not isinstance(getattr(config, name, None), int)]
    if missing:
        raise InvalidRequest(f"config.json of {config.model_type} lacks {', '.join(missing)}")
    window = getattr(config, "sliding_window", None)
    reach = min(longest or config.max_position_embeddings, config.max_position_embeddings)
    if window is not None and getattr(config, "use_sliding_window", True) and window < reach:
        raise InvalidRequest(
            f"attention to a sliding window of {window} tokens is not supported; "
            f"max_model_len is {reach}, and up to {window} it would be the same as full attention"
        )
    return config


def _dtype_and_device(config: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.dtype, torch.device]:
    devices = {tensor.device for tensor in tensors.values()}
    if len(devices) != 1:
        raise InvalidRequest(f"the tensors lie on {len(devices)} devices, expected one")
    found = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if not found:
        raise InvalidRequest("the checkpoint holds no floating-point tensor")
    wanted = config.dtype if isinstance(config.dtype, torch.dtype) else None
    if wanted is None and len(found) == 1:
        wanted = next(iter(found))
    if wanted is None:
        raise InvalidRequest("config.json gives no dtype and the checkpoint holds several")
    if wanted not in found:
        held = ", ".join(sorted(map(_short, found)))
        raise InvalidRequest(
            f"config.json asks for {_short(wanted)}, the checkpoint holds {held}; weights are served as "
            "they lie, so convert the checkpoint or correct the config"
        )
    return wanted, next(iter(devices))


def _refuse_tf32(dtype: torch.dtype, device: torch.device) -> None:
    """float32 weights are for exact answers; with TF32 products keep 10 bits of each factor."""
    matmul = torch.backends.cuda.matmul
    # torch before 2.9 knows the flag only, and later ones refuse to read it once the precision was set.
    precision = getattr(matmul, "fp32_precision", None)
    is_rounded = matmul.allow_tf32 if precision is None else precision == "tf32"
    if device.type == "cuda" and dtype == torch.float32 and is_rounded:
        raise InvalidRequest("torch is set to compute float32 products in TF32; serve bfloat16 or unset it")


def _make_module(config: Any) -> Any:
    try:
        # float32 is torch's default already: naming it keeps `transformers` from changing the default
        # dtype of the process while other threads compute.  The meta device is set for this thread only.
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config, trust_remote_code=False, attn_implementation=ATTENTION, dtype=torch.float32
            )
    except (ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise InvalidRequest(f"transformers cannot make a {config.model_type}: {error}") from error
    if not module._supports_attention_backend:
        raise InvalidRequest(f"{type(module).__name__} does not take an attention function")
    return module


def _match(
    module: Any, tensors: dict[str, torch.Tensor], tied: dict[str, str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The tensor for each name of the module's state, tied targets left out."""
    for target, source in tied.items():
        twin = tensors.pop(target, None)
        if twin is None:
            continue
        if source not in tensors:
            tensors[source] = twin
        elif not _is_same(twin, tensors[source]):
            raise InvalidRequest(f"{target} and {source} are tied by the config but differ in the checkpoint")
    expected: dict[str, torch.Tensor] = {
        name: value for name, value in module.state_dict(keep_vars=True).items() if name not in tied
    }
    missing = sorted(expected.keys() - tensors.keys())
    if missing:
        raise InvalidRequest(_list("the checkpoint lacks", missing), tensor=missing[0])
    ignored = [re.compile(pattern) for pattern in module._keys_to_ignore_on_load_unexpected or ()]
    unexpected = sorted(
        name for name in tensors.keys() - expected.keys() if not any(p.search(name) for p in ignored)
    )
    if unexpected:
        raise InvalidRequest(_list("the model has no place for", unexpected), tensor=unexpected[0])
    for name, place in expected.items():
        wanted = dtype if place.is_floating_point() else place.dtype
        _refuse_unlike(name, tensors[name], place.shape, wanted)
    return {name: tensors[name] for name in expected}


def _refuse_unlike(name: str, tensor: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if tensor.shape != shape:
        raise InvalidRequest(
            f"tensor {name!r}: expected shape {tuple(shape)}, found {tuple(tensor.shape)}", tensor=name
        )
    if tensor.dtype != dtype:
        raise InvalidRequest(
            f"tensor {name!r}: expected {_short(dtype)}, found {_short(tensor.dtype)}", tensor=name
        )


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes (NaN included), or are one place."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _assign(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> None:
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        if leaf in owner._parameters:
            owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
        else:
            owner._buffers[leaf] = tensor
    for target, source in tied.items():
        path, _, leaf = target.rpartition(".")
        module.get_submodule(path)._parameters[leaf] = module.get_parameter(source)


def _compute_buffers(module: Any, device: torch.device) -> None:
    """Fill buffers that no checkpoint stores by the model's own initialisation, while the parameters
    are still on the meta device and cannot be written.

    It is run over two different fills: a buffer that comes out different was left as it was.  On the
    CPU, as `transformers` does when it loads, so that the same numbers come out for every device."""
    for owner in module.modules():
        names = sorted(leaf for leaf in owner._non_persistent_buffers_set if owner._buffers[leaf] is not None)
        results: list[list[torch.Tensor]] = []
        for fill in (0, 1):
            for leaf in names:
                place = owner._buffers[leaf]
                owner._buffers[leaf] = torch.full(place.shape, fill, dtype=place.dtype, device="cpu")
            if names:
                with torch.no_grad():
                    module._init_weights(owner)
            results.append([owner._buffers[leaf] for leaf in names])
        for leaf, one, other in zip(names, *results, strict=True):
            if not torch.equal(one, other):
                raise InvalidRequest(
                    f"{type(owner).__name__} does not say how its buffer {leaf!r} is derived", buffer=leaf
                )
            owner._buffers[leaf] = other.to(device)


def _refuse_meta(module: torch.nn.Module) -> None:
    for path, owner in module.named_modules():
        held = {**owner._parameters, **owner._buffers, **owner.__dict__}
        for leaf, value in held.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise InvalidRequest(f"{path}.{leaf} has no value: neither stored nor derived")


def _end_tokens(config: Any, assets: Path) -> frozenset[int]:
    """Tokens that end a sequence, from generation_config.json or else the config."""
    found = config.eos_token_id
    path = assets / "generation_config.json"
    if path.is_file():
        try:
            generation = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidRequest(f"generation_config.json is not JSON: {error}") from error
        if isinstance(generation, dict):
            found = generation.get("eos_token_id", found)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _list(what: str, names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what} {', '.join(map(repr, names[:3]))}{rest}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
