"""loaderd's configuration file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from loaderd.signature.keys import KeyRefused, TrustedKey
from loaderd.throttle import Limits
from shared.config_faults import refusal
from shared.config_file import ByteCount, ConfigModel, ConfigPath
from shared.memory.pool import PIECE_BYTES
from shared.memory.selection import BackendName
from shared.messages import Name
from shared.run_dir import DEFAULT_RUN_DIR

Timeout = Annotated[float, Field(gt=0, le=86_400)]
_Value = TypeVar("_Value")


def _read_key(value: object) -> TrustedKey:
    if isinstance(value, TrustedKey):
        return value
    if not isinstance(value, str):
        raise refusal("the path of a PEM file", value)
    if "-----BEGIN " in value:  # a key's text, which may be a secret, is not to be told as a path
        raise PydanticCustomError("trusted_key", "expected the path of a PEM file, found what is in one")
    try:
        return TrustedKey.read(Path(value))
    except KeyRefused as error:
        raise PydanticCustomError("trusted_key", "{reason}", {"reason": error.message}) from error


def _distinct(values: tuple[_Value, ...]) -> tuple[_Value, ...]:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise PydanticCustomError("twice", "names {value} twice", {"value": str(value)})
    return values


def _distinct_keys(keys: tuple[TrustedKey, ...]) -> tuple[TrustedKey, ...]:
    """Two files with one key are a rotation that did not happen."""
    paths: dict[str, Path] = {}
    for key in keys:
        if key.hint in paths:
            both = {"first": str(paths[key.hint]), "second": str(key.path)}
            raise PydanticCustomError("twice", "{first} and {second} hold the same key", both)
        paths[key.hint] = key.path
    return keys


class ModelConfig(ConfigModel):
    """How one model's versions are checked and rolled out."""

    devices: (
        Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_distinct)] | Literal["all"] | None
    ) = None  # None: `device`
    verify: Literal["digest", "sealed", "signed"] = "digest"
    trusted_keys: Annotated[  # read with the file
        tuple[Annotated[TrustedKey, PlainValidator(_read_key)], ...], AfterValidator(_distinct_keys)
    ] = ()
    prepare_timeout_s: Timeout = 600.0  # mapping, building and warming on every inferd
    commit_timeout_s: Timeout = 10.0  # a flip takes microseconds; this is for a hung process
    drain_timeout_s: Timeout = 300.0  # requests still running on a version whose slot is needed

    @model_validator(mode="after")
    def _keys_go_with_signed(self) -> Self:
        if (self.verify == "signed") != bool(self.trusted_keys):
            raise PydanticCustomError(
                "trusted_keys",
                "trusted_keys and verify = 'signed' are of no use without each other, "
                "found verify = '{verify}' and {keys} trusted_keys",
                {"verify": self.verify, "keys": len(self.trusted_keys)},
            )
        return self


class LoaderdConfig(ConfigModel):
    """The whole file.  Models need no entry; one without has the defaults."""

    run_dir: ConfigPath = DEFAULT_RUN_DIR
    state_dir: ConfigPath = Path("/var/lib/changeover")
    model_roots: Annotated[tuple[ConfigPath, ...], Field(min_length=1), AfterValidator(_distinct)]
    backend: BackendName = "host"
    device: str | None = None  # full UUID; of models that name none; may be left out where there is one
    legacy_ipc: bool = False  # cuda: blocks of legacy CUDA IPC in place of fds, which inferds could write to
    memory_limit_bytes: Annotated[ByteCount, Field(gt=0)] | None = None  # of weights on each device
    pool_bytes: Annotated[ByteCount, Field(ge=PIECE_BYTES)] | None = (
        None  # cuda: on each device, kept for weights
    )
    slab_bytes: Annotated[ByteCount, Field(ge=2 << 20)] | None = None  # None: what suits the backend
    admin_group: str | None = None  # may push and roll back, beside root and the daemon's user
    inferd_group: str | None = None  # may attach and take weights, and nothing else
    adopt_grace_s: Timeout = 5.0  # after a restart, wait this long for inferds before loading again
    throttle_above_share: Annotated[float, Field(gt=0, le=10)] | Literal["off"] = 0.15  # of quiet latency
    throttle_floor_bytes_per_s: Annotated[ByteCount, Field(ge=1 << 20)] = 64 << 20  # a push always goes on
    scrub_interval_s: Annotated[float, Field(ge=1, le=30 * 86_400)] | None = None  # hash all resident again
    scrub_bytes_per_s: Annotated[ByteCount, Field(ge=1 << 20)] = 256 << 20  # at most, over all devices
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    models: dict[Name, ModelConfig] = Field(default_factory=dict)

    def throttle_limits(self) -> Limits | None:
        """What the throttle keeps to; None where it is off."""
        if self.throttle_above_share == "off":
            return None
        return Limits(self.throttle_above_share, float(self.throttle_floor_bytes_per_s))

    def model(self, name: str) -> ModelConfig:
        """The settings of a model."""
        return self.models.get(name, ModelConfig())
