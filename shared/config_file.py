"""Configuration files: TOML checked against a model in which every unknown key is an error."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from shared.config_faults import dates_in, faults_of, refusal, told
from shared.errors import ConfigError

CONFIG_BYTES = 1 << 20
"""Cap of a configuration file."""

MOST_BYTES = 1 << 48
"""More than any host has; what counts bytes must not be more."""


class ConfigModel(BaseModel):
    """Base of all configuration models, nested ones included: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Config = TypeVar("Config", bound=ConfigModel)


def _check_path(value: object) -> object:
    if value == "" or (isinstance(value, str) and "\0" in value):
        raise refusal("a path", value)
    return value


ByteCount = Annotated[int, Field(le=MOST_BYTES)]

ConfigPath = Annotated[Path, BeforeValidator(_check_path)]
"""A path that is not empty, which would be the current directory."""


def load_config(path: Path, model_type: type[Config]) -> Config:
    """Read and check the file; raises ConfigError that names the file and each key at fault.

    Types are strict, as if the file were JSON: `"80"` is no port and `1` is no boolean, but text is
    a path or an enum member where the model says so.  Dates and times are refused.  Blocks on the file.
    """
    text = _read(path)
    try:
        data = tomllib.loads(text)
        dates = dates_in(data)
        document = json.dumps(data, default=str)  # dates and times, which are told as such
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}", file=str(path)) from error
    except RecursionError as error:
        raise ConfigError(f"{path}: not TOML: too deeply nested", file=str(path)) from error
    except ValueError as error:  # Python reads no more digits than 4300
        raise ConfigError(f"{path}: holds a number of thousands of digits", file=str(path)) from error
    faults = dates
    try:
        config = model_type.model_validate_json(document, strict=True)
    except ValidationError as error:
        dated = {fault.key for fault in dates}
        faults = [*dates, *(each for each in faults_of(error, json.loads(document)) if each.key not in dated)]
    if faults:
        message, keys = told(faults)
        raise ConfigError(f"{path}: {message}", file=str(path), key=keys)
    return config


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
