"""A version's config and tokenizer files as one blob, read once and shipped as they were digested."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shared.errors import InvariantError, ProtocolError
from shared.packed_format import PackedFormat

ASSETS_LIMIT_BYTES = 256 << 20
"""Cap of an encoded bundle; tokenizers of today take a few tens of MiB."""

MAX_ASSETS = 64

_FORMAT = PackedFormat("asset bundle", "changeover-assets", 1, ("files",))

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")


def is_asset_name(name: str) -> bool:
    """Whether `name` is a plain file name: no separator, no leading dot, no control character."""
    return _FILE_NAME.fullmatch(name) is not None


def encode_assets(assets: Mapping[str, bytes]) -> bytes:
    """Serialise file name → content; the same files give the same bytes."""
    for name in assets:
        if not is_asset_name(name):
            raise InvariantError(f"{name!r} is not an asset name")
    return _FORMAT.pack([(name, assets[name]) for name in sorted(assets)])


def decode_assets(data: bytes) -> dict[str, bytes]:
    """Parse a bundle; every key is safe as a file name.  Raises ProtocolError."""
    (rows,) = _FORMAT.unpack(
        data, ASSETS_LIMIT_BYTES, max_str_len=256, max_bin_len=len(data), max_array_len=MAX_ASSETS
    )
    assets: dict[str, bytes] = {}
    for row in rows:
        match row:
            case (str(file_name), bytes(content)) if is_asset_name(file_name):
                pass
            case _:
                raise ProtocolError("asset bundle holds something that is not a named file")
        if file_name in assets:
            raise ProtocolError(f"asset bundle holds {file_name!r} twice")
        assets[file_name] = content
    return assets
