"""The other loaders, each as its own documentation says it is fastest, behind one call.

A loader is imported when it is asked for: one that is not there is reported, and keeps nobody else from
being measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tests.bench.load_model import Model, pieces
from tests.bench.load_report import CACHED, COLD, TMPFS, Verification

Setting = Mapping[str, Any]
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Resident:
    """Tensors on the device, every byte of them there, and what keeps them."""

    tensors: Mapping[str, torch.Tensor]
    close: Callable[[], None] = lambda: None
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of the load's parts


@dataclass(frozen=True, slots=True)
class Loader:
    """How to measure one loader."""

    package: str  # as it is installed
    load: Callable[[Path, str, Setting], Resident]
    settings: Callable[[str, str, int], Sequence[Setting]]  # of place, device and cores
    devices: tuple[str, ...] = ("cuda", "host")
    environment: Callable[[str], Mapping[str, str]] = lambda place: NOTHING
    verification: Callable[[Setting], Verification] = lambda setting: Verification.NONE
    prepare: Callable[[Path, Model, int], None] | None = None  # its own format, at most so many bytes
    files: Callable[[Path], list[Path]] = lambda folder: sorted(folder.glob("*.safetensors"))


def torch_device(device: str) -> str:
    """torch's name of the device."""
    return "cuda:0" if device == "cuda" else "cpu"


# --- safetensors ---------------------------------------------------------------------------------


def _safetensors(folder: Path, device: str, setting: Setting) -> Resident:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in _shards(folder):
        loaded = load_file(path, device=torch_device(device), backend=setting["backend"])
        if setting.get("clone"):
            loaded = {name: tensor.clone() for name, tensor in loaded.items()}
        tensors |= loaded
    return Resident(tensors)


def _safetensors_settings(place: str, device: str, cores: int) -> list[Setting]:
    # In host memory `mmap` gives views of the file: nothing is loaded until it is copied.
    mmap = {"backend": "mmap", "clone": True} if device == "host" else {"backend": "mmap"}
    return [mmap] if place == COLD else [mmap, {"backend": "pread"}]


# --- fastsafetensors -----------------------------------------------------------------------------


def _fastsafetensors(folder: Path, device: str, setting: Setting) -> Resident:
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, torch_device(device), nogds=True, max_threads=setting["max_threads"])
    loader.add_filenames({0: [str(path) for path in _shards(folder)]})
    files = loader.copy_files_to_device(max_copy_block_size=setting["max_copy_block_size"])
    tensors = {name: files.get_tensor(name) for name in loader.get_keys()}

    def close() -> None:
        files.close()
        loader.close()

    return Resident(tensors, close)


def _fastsafetensors_environment(place: str) -> Mapping[str, str]:
    # It reads past the page cache unless told otherwise.
    return {"FASTSAFETENSORS_ODIRECT": "0"} if place == CACHED else NOTHING


def _fastsafetensors_settings(place: str, device: str, cores: int) -> list[Setting]:
    # Its default is one request for a whole file, so that as many threads work as there are files.
    parts: list[Setting] = [
        {"max_threads": max(16, cores), "max_copy_block_size": block} for block in (256 << 20, 64 << 20)
    ]
    whole = {"max_threads": 16, "max_copy_block_size": 16 << 30}
    return parts[:1] if place == COLD else [*parts, whole]


# --- InstantTensor -------------------------------------------------------------------------------


def _instanttensor(folder: Path, device: str, setting: Setting) -> Resident:
    import instanttensor

    arguments = dict(setting)
    if "backend" in arguments:
        name = arguments["backend"]
        policy = instanttensor.BackendPolicy
        arguments["backend"] = policy[name] if name in policy.__members__ else instanttensor.Backend[name]
    paths = [str(path) for path in _shards(folder)]
    opened = ExitStack()
    loading = opened.enter_context(
        instanttensor.safe_open(paths, framework="pt", device=torch_device(device), **arguments)
    )
    tensors = dict(loading.tensors())
    if arguments.get("copy", True):
        opened.close()
    return Resident(tensors, opened.close)


def _instanttensor_settings(place: str, device: str, cores: int) -> list[Setting]:
    if place == TMPFS:
        return [{}, {"concurrency": cores}]
    if place == CACHED:
        return [{"backend": "BUFFERED"}, {"backend": "MMAP", "concurrency": cores}]
    return [{}]


# --- Run:ai Model Streamer -----------------------------------------------------------------------


def _runai(folder: Path, device: str, setting: Setting) -> Resident:
    from runai_model_streamer import SafetensorsStreamer

    # It asks for the variable at every load.
    os.environ["RUNAI_STREAMER_MEMORY_LIMIT"] = str(setting["memory_limit_bytes"])
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in _shards(folder)], device=torch_device(device))
        return Resident(dict(streamer.get_tensors()))


def _runai_settings(place: str, device: str, cores: int) -> list[Setting]:
    # Buffers for everything at once, or few that are used again; from a disk that makes no difference.
    limits = (5 << 30, -1)
    return [{"memory_limit_bytes": limit} for limit in (limits[:1] if place == COLD else limits)]


def _runai_environment(place: str) -> Mapping[str, str]:
    # It reads past the page cache where it can: that is for the disk.
    quiet = {"RUNAI_STREAMER_LOG_LEVEL": "ERROR"}
    return quiet if place == COLD else quiet | {"RUNAI_STREAMER_FS_STRATEGY": "sync_buffered"}


# --- tensorizer ----------------------------------------------------------------------------------

_TENSORIZED = "model.tensors"


def _tensorizer(folder: Path, device: str, setting: Setting) -> Resident:
    from tensorizer import TensorDeserializer

    loaded = TensorDeserializer(folder / _TENSORIZED, device=torch_device(device), **setting)
    return Resident({name: parameter.data for name, parameter in loaded.items()}, loaded.close)


def _tensorize(folder: Path, model: Model, limit_bytes: int) -> None:
    """Its own format, of the first tensors that have `limit_bytes` together, one at least."""
    from tensorizer import TensorSerializer

    tensors: dict[str, torch.Tensor] = {}
    left = limit_bytes
    for tensor in model.tensors:
        left -= tensor.nbytes
        if tensors and left < 0:
            break
        content = torch.cat([torch.from_numpy(piece) for piece in pieces(tensor)])
        tensors[tensor.name] = content.view(torch.bfloat16).reshape(tensor.shape)
    unfinished = folder / f"{_TENSORIZED}.new"
    serializer = TensorSerializer(unfinished)
    serializer.write_state_dict(tensors)
    serializer.close()
    unfinished.rename(folder / _TENSORIZED)


def _tensorizer_settings(place: str, device: str, cores: int) -> list[Setting]:
    both: list[Setting] = [{"num_readers": cores, "verify_hash": verify} for verify in (True, False)]
    return both[:1] if place == COLD else both


def _tensorizer_verification(setting: Setting) -> Verification:
    return Verification.SEALED if setting["verify_hash"] else Verification.NONE


# --- all -----------------------------------------------------------------------------------------


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


PEERS: Mapping[str, Loader] = MappingProxyType(
    {
        "instanttensor": Loader("instanttensor", _instanttensor, _instanttensor_settings, devices=("cuda",)),
        "fastsafetensors": Loader(
            "fastsafetensors",
            _fastsafetensors,
            _fastsafetensors_settings,
            environment=_fastsafetensors_environment,
        ),
        "runai-model-streamer": Loader(
            "runai-model-streamer", _runai, _runai_settings, environment=_runai_environment
        ),
        "safetensors": Loader("safetensors", _safetensors, _safetensors_settings),
        "tensorizer": Loader(
            "tensorizer",
            _tensorizer,
            _tensorizer_settings,
            verification=_tensorizer_verification,
            prepare=_tensorize,
            files=lambda folder: [folder / _TENSORIZED],
        ),
    }
)
