"""Configuration files: TOML checked against a model in which every unknown key is an error."""

from __future__ import annotations

import datetime
import json
import os
import stat
import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from shared.errors import ConfigError

CONFIG_BYTES = 1 << 20
"""Cap of a configuration file."""

_SHOWN_FAULTS = 10


class ConfigModel(BaseModel):
    """Base of all configuration models, nested ones included: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Config = TypeVar("Config", bound=ConfigModel)


def load_config(path: Path, model_type: type[Config]) -> Config:
    """Read and check the file; raises ConfigError that names the file and each key at fault.

    Types are strict, as if the file were JSON: `"80"` is no port and `1` is no boolean, but text is
    a path or an enum member where the model says so.  Blocks on the file.
    """
    text = _read(path)
    try:
        data = tomllib.loads(text)
        document = json.dumps(data, default=_dated)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        detail = str(error) or "too deeply nested"
        raise ConfigError(f"{path}: not TOML: {detail}", file=str(path)) from error
    try:
        return model_type.model_validate_json(document, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        lines = [_fault(dict(fault)) for fault in faults[:_SHOWN_FAULTS]]
        if len(faults) > _SHOWN_FAULTS:
            lines.append(f"and {len(faults) - _SHOWN_FAULTS} more")
        keys = ", ".join(_key(fault["loc"]) for fault in faults[:_SHOWN_FAULTS])
        raise ConfigError(f"{path}: {'; '.join(lines)}", file=str(path), key=keys) from error


def _read(path: Path) -> str:
    try:
        # Without O_NONBLOCK a FIFO in the file's place would block for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", file=str(path)) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"{path}: not a regular file", file=str(path))
        with os.fdopen(fd, "rb", closefd=False) as file:
            content = file.read(CONFIG_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > CONFIG_BYTES:
        raise ConfigError(f"{path}: larger than {CONFIG_BYTES} bytes", file=str(path))
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}", file=str(path)) from error


def _dated(value: object) -> str:
    if isinstance(value, datetime.date | datetime.time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"TOML has no {type(value).__name__}")


def _key(where: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in where) or "(top level)"


def _fault(fault: dict[str, object]) -> str:
    where = fault["loc"]
    key = _key(where) if isinstance(where, tuple) else str(where)
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if fault["type"] == "missing":
        return f"{key}: missing"
    return f"{key}: {fault['msg']}"
