"""Lists of rows as msgpack, under a format's name and version: how tables travel in a file of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from shared.errors import ProtocolError


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """One format: the value is [name, version, rows of the first part, rows of the second, …]."""

    what: str  # in messages
    name: str
    version: int
    parts: tuple[str, ...]

    def pack(self, *parts: Sequence[object]) -> bytes:
        """Serialise the rows of each part."""
        packed: bytes = msgpack.packb([self.name, self.version, *parts], use_bin_type=True)
        return packed

    def unpack(
        self, data: bytes, limit_bytes: int, *, max_str_len: int, max_bin_len: int, max_array_len: int
    ) -> tuple[tuple[object, ...], ...]:
        """The rows of each part, lists in them as tuples and otherwise unchecked.  Raises ProtocolError where
        the bytes are too many, exceed a cap, or are of another format or version."""
        if len(data) > limit_bytes:
            raise ProtocolError(f"{self.what} of {len(data)} bytes exceeds {limit_bytes}")
        try:
            value = msgpack.unpackb(
                data,
                raw=False,
                use_list=False,
                max_str_len=max_str_len,
                max_bin_len=max_bin_len,
                max_array_len=max_array_len,
                max_map_len=0,
                max_ext_len=0,
            )
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise ProtocolError(f"{self.what} is not msgpack: {error}") from error
        match value:
            case (str(name), int(version), *parts) if self._are_parts(parts):
                pass
            case _:
                raise ProtocolError(f"{self.what} is not (format, version, {', '.join(self.parts)})")
        if name != self.name or version != self.version:
            raise ProtocolError(
                f"{self.what} is {name!r} version {version}, expected {self.name!r} {self.version}"
            )
        return tuple(parts)

    def _are_parts(self, parts: Sequence[object]) -> bool:
        return len(parts) == len(self.parts) and all(isinstance(part, tuple) for part in parts)
