"""inferd's configuration file."""

from __future__ import annotations

import os
import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from inferd.api.settings import ApiSettings
from inferd.engine.transformers_engine import EngineSettings
from shared.config_faults import refusal
from shared.config_file import ByteCount, ConfigModel, ConfigPath
from shared.errors import InvalidRequest
from shared.memory.selection import BackendName
from shared.messages import Name
from shared.run_dir import DEFAULT_RUN_DIR, PATH_BYTES

Timeout = Annotated[float, Field(gt=0, le=86_400)]

_LISTEN = re.compile(r"unix:/[^\0\n]+|\[?[0-9A-Za-z.:-]+\]?:[0-9]{1,5}")
_LAST_PORT = 65_535

# Instances: on a slotted class, the attributes are descriptors and not the defaults.
_ENGINE = EngineSettings()
_API = ApiSettings()


class EngineConfig(ConfigModel):
    """How large the engine may grow; see `EngineSettings`."""

    # How much is needed at least, the model says; less than this is a slip of the unit.
    kv_cache_bytes: Annotated[ByteCount, Field(ge=1 << 20)] | None = _ENGINE.kv_cache_bytes
    kv_cache_share: Annotated[float, Field(gt=0, lt=1)] = _ENGINE.kv_cache_share
    block_tokens: Annotated[int, Field(ge=1, le=1024)] = _ENGINE.block_tokens
    max_batch_tokens: Annotated[int, Field(ge=1)] = _ENGINE.max_batch_tokens
    mixed_batch_tokens: Annotated[int, Field(ge=1)] | None = _ENGINE.mixed_batch_tokens
    max_sequences: Annotated[int, Field(ge=1)] = _ENGINE.max_sequences
    max_waiting: Annotated[int, Field(ge=1)] = _ENGINE.max_waiting
    max_model_len: Annotated[int, Field(ge=2)] | None = _ENGINE.max_model_len
    torch_threads: Annotated[int, Field(ge=1, le=1024)] | None = _ENGINE.torch_threads
    cuda_graphs: bool = _ENGINE.cuda_graphs

    def settings(self) -> EngineSettings:
        """As the engine takes them."""
        return EngineSettings(**self.model_dump())

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        try:
            self.settings()
        except InvalidRequest as error:
            raise PydanticCustomError("engine", "{reason}", {"reason": error.message}) from error
        return self


class ApiConfig(ConfigModel):
    """Limits of the HTTP API; see `ApiSettings`."""

    max_body_bytes: Annotated[ByteCount, Field(ge=1024)] = _API.max_body_bytes
    max_sequences_per_request: Annotated[int, Field(ge=1)] = _API.max_sequences_per_request
    retry_after_s: Annotated[int, Field(ge=1)] = _API.retry_after_s
    completion_max_tokens: Annotated[int, Field(ge=1)] = _API.completion_max_tokens

    def settings(self) -> ApiSettings:
        """As the API takes them."""
        return ApiSettings(**self.model_dump())


class InferdConfig(ConfigModel):
    """The whole file."""

    name: Annotated[Name, Field(max_length=32)]  # unique on the host
    model: Name
    run_dir: ConfigPath = DEFAULT_RUN_DIR
    backend: BackendName = "host"
    device: str | None = None  # full UUID of the GPU to serve on; may be left out where it sees one
    listen: str = "127.0.0.1:8000"
    verify_mapped: bool = True  # hash every byte as mapped here before it may serve
    shutdown_timeout_s: Timeout = 30.0  # requests in flight at SIGTERM may take this long
    stuck_after_s: Timeout = 60.0  # work pending and no step for this long: not live
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    engine: EngineConfig = EngineConfig()
    api: ApiConfig = ApiConfig()

    @field_validator("listen")
    @classmethod
    def _is_an_address(cls, listen: str) -> str:
        if not _LISTEN.fullmatch(listen):
            raise refusal("HOST:PORT or unix:/PATH", listen)
        if listen.startswith("unix:"):
            path = listen.removeprefix("unix:")
            if len(os.fsencode(path)) > PATH_BYTES:
                raise refusal(f"a path of at most {PATH_BYTES} bytes", path)
        # The kernel would take the number modulo 65536.
        elif int(port := listen.rpartition(":")[2]) > _LAST_PORT:
            raise refusal(f"a port of at most {_LAST_PORT}", int(port))
        return listen
