"""msgpack frames with a size cap, checked against a typed message on both ends."""

from __future__ import annotations

from typing import TypeVar

import msgpack
from pydantic import BaseModel, TypeAdapter, ValidationError

from shared.errors import ProtocolError

PROTOCOL_VERSION = 1
"""Raised whenever a field changes its meaning; both ends must agree exactly."""

CONTROL_FRAME_BYTES = 1 << 20
"""Cap of a control or event frame; a status of a thousand versions fits ten times over."""

HANDOFF_FRAME_BYTES = 64 << 10
"""Cap of a handoff frame; below the default socket buffer, large tables travel as memfds."""

_MAX_DEPTH_ITEMS = 100_000

Message = TypeVar("Message", bound=BaseModel)


def encode(message: BaseModel, cap_bytes: int) -> bytes:
    """Serialise a message; raises ProtocolError if it exceeds `cap_bytes`."""
    frame: bytes = msgpack.packb(message.model_dump(mode="python"), use_bin_type=True)
    if len(frame) > cap_bytes:
        raise ProtocolError(
            f"message of {len(frame)} bytes exceeds the frame cap of {cap_bytes}",
            size_bytes=len(frame),
            cap_bytes=cap_bytes,
        )
    return frame


def decode(frame: bytes | memoryview, adapter: TypeAdapter[Message], cap_bytes: int) -> Message:
    """Parse and validate a frame; raises ProtocolError on size, syntax, unknown or mistyped fields."""
    if len(frame) > cap_bytes:
        raise ProtocolError(
            f"frame of {len(frame)} bytes exceeds the cap of {cap_bytes}",
            size_bytes=len(frame),
            cap_bytes=cap_bytes,
        )
    try:
        # Sizes inside a frame are bounded by the frame, so that a short frame cannot announce an
        # array that msgpack would allocate before it notices that the bytes are not there.
        value = msgpack.unpackb(
            frame,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=len(frame),
            max_bin_len=len(frame),
            max_array_len=min(len(frame), _MAX_DEPTH_ITEMS),
            max_map_len=min(len(frame), _MAX_DEPTH_ITEMS),
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise ProtocolError(f"frame is not msgpack: {error}") from error
    try:
        return adapter.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(f"message refused at {where or 'top level'}: {first['msg']}") from error
