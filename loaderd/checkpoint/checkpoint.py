"""An open checkpoint: its tensors by place in the files, and its config and tokenizer files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

from loaderd.checkpoint.folder import Folder
from loaderd.checkpoint.header import PREFIX_BYTES, TensorSource, header_length, parse_header
from loaderd.checkpoint.index import INDEX_LIMIT_BYTES, parse_index, select_tensors
from loaderd.checkpoint.names import (
    ASSET_FILES,
    CONFIG_FILE,
    INDEX_FILE,
    SEAL_FILE,
    SIGNATURE_FILE,
    SINGLE_FILE,
    is_partial,
    is_weight_like,
    shown,
)
from loaderd.checkpoint.source_file import FileIdentity, SourceFile
from loaderd.checkpoint.strict_json import parse_object
from shared.closing import Closing
from shared.errors import CheckpointError, UnknownVersion

ASSET_LIMIT_BYTES = 64 << 20
"""Cap of all config and tokenizer files together."""

CONFIG_LIMIT_BYTES = 8 << 20
"""Cap of config.json alone, which is parsed."""

SEAL_LIMIT_BYTES = 512 << 20

_CONFIG_ENTRIES = 65_536


@dataclass(frozen=True, slots=True)
class ParsedHeader:
    """The beginning of a weight file as it was parsed, for whoever reads it again."""

    nbytes: int  # with the length before it
    sha256: bytes


class Checkpoint(Closing):
    """A checkpoint whose headers were checked.  Owns the fds of its folder and weight files.

    `tensors` are sorted by name.  `assets` are the very bytes to digest and to ship.  `ignored` says
    in words what the folder holds beside them.
    """

    def __init__(self, take_folder: Folder) -> None:
        """Read and check all headers and assets; consumes the folder, on every path.  Blocking.

        Raises CheckpointError that names file, tensor and byte.
        """
        with ExitStack() as undo:
            self._folder = undo.enter_context(take_folder)
            self._sources: dict[str, SourceFile] = {}
            self._headers: dict[str, ParsedHeader] = {}
            self._identities: dict[str, FileIdentity] = {}
            self._names = take_folder.names()
            self.name = take_folder.name
            self.seal_bytes = self._read_optional(SEAL_FILE, SEAL_LIMIT_BYTES)
            if not self.is_sealed:
                self.refuse_unfinished()
            self.index_bytes = self._read_optional(INDEX_FILE, INDEX_LIMIT_BYTES)
            selected, ignored = self._read_headers(undo)
            if not selected:
                raise CheckpointError("holds no tensor", file=self.files[0])
            self.tensors: tuple[TensorSource, ...] = tuple(sorted(selected, key=lambda tensor: tensor.name))
            self.ignored: tuple[str, ...] = (*ignored, *self._unused_files())
            self.assets: Mapping[str, bytes] = MappingProxyType(self._read_assets())
            self.config: Mapping[str, object] = MappingProxyType(parse_config(self.assets[CONFIG_FILE]))
            self._undo = undo.pop_all()

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the weight files, sorted."""
        return tuple(sorted(self._sources))

    @property
    def is_sealed(self) -> bool:
        """Whether the folder holds a seal; what it says is another question."""
        return self.seal_bytes is not None

    @property
    def documents(self) -> dict[str, bytes]:
        """Every file beside the weights that a seal covers: the assets and the index."""
        index = {} if self.index_bytes is None else {INDEX_FILE: self.index_bytes}
        return {**self.assets, **index}

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def root(self) -> Path:
        """The model root the folder lies below."""
        return self._folder.root

    def borrow_fd(self, file: str) -> int:
        """The fd of a weight file, open for reading; it stays owned by the checkpoint."""
        return self._sources[file].borrow_fd()

    def borrow_folder_fd(self) -> int:
        """The folder's fd (O_PATH); it stays owned by the checkpoint."""
        return self._folder.borrow_fd()

    def header(self, file: str) -> ParsedHeader:
        """The header that the tensors of a weight file were taken from."""
        return self._headers[file]

    def file_bytes(self, file: str) -> int:
        """Size of a weight file when it was opened."""
        return self._sources[file].nbytes

    def refuse_unfinished(self) -> None:
        """Raise CheckpointError if the folder holds a file that a downloader has not finished.

        Done on opening where there is no seal, which is written last and so says that all is there.
        """
        partial = sorted(name for name in self._names if is_partial(name))
        if partial:
            raise CheckpointError("looks like an unfinished upload", file=shown(partial[0]))

    def verify_unchanged(self) -> None:
        """Raise CheckpointError if a file was written, resized or replaced since it was opened.

        Call it after the last read: bytes read before it are those of one unchanging folder.  In an
        unsealed folder a weight file that appeared or went away is a change as well, since nothing
        else says that the upload had ended.
        """
        for source in self._sources.values():
            source.verify_unchanged()
            source.identity.verify_name(self._folder, source.name)
        for name, identity in self._identities.items():
            identity.verify_name(self._folder, name)
        if not self.is_sealed:
            now = self._folder.names()
            changed = sorted(
                name
                for name in self._names ^ now
                if name in ASSET_FILES or is_weight_like(name) or is_partial(name)
            )
            if changed:
                raise CheckpointError(
                    "appeared or went away while the unsealed folder was read", file=shown(changed[0])
                )

    def read_signature(self, limit_bytes: int) -> bytes | None:
        """`model.sig`, if the folder holds one; a change to it counts from here on.  Blocking."""
        return self._read_optional(SIGNATURE_FILE, limit_bytes)

    def tree(self, is_ignored: Callable[[str], bool]) -> dict[str, bool]:
        """Every file below the folder now, and whether it is a symlink; see `Folder.tree`.  Blocking."""
        return self._folder.tree(is_ignored)

    def open_below(self, path: str) -> SourceFile:
        """Open any file below the folder; the caller owns it."""
        return SourceFile(path, self._folder.open_below(path))

    def close(self) -> None:
        """Close all fds; closing again does nothing."""
        self._undo.close()

    def _unused_files(self) -> list[str]:
        used = {*self._sources, INDEX_FILE, SEAL_FILE}
        others = sorted(name for name in self._names - used if is_weight_like(name))
        return [f"{shown(name)}: not part of the checkpoint" for name in others]

    def _read_headers(self, undo: ExitStack) -> tuple[Sequence[TensorSource], Sequence[str]]:
        """Open the weight files and parse their headers; the index decides which, if there is one."""
        if self.index_bytes is not None:
            weight_map = parse_index(self.index_bytes)
            shards = {file: self._read_header(undo, file) for file in sorted(set(weight_map.values()))}
            return select_tensors(weight_map, shards)
        if SINGLE_FILE in self._names:
            return self._read_header(undo, SINGLE_FILE), ()
        if any(is_weight_like(name) and not name.endswith(".py") for name in self._names):
            raise CheckpointError(
                f"neither {SINGLE_FILE} nor {INDEX_FILE}: only safetensors checkpoints are read, "
                "pickled or other weights never",
                file=self.name,
            )
        raise CheckpointError(f"neither {SINGLE_FILE} nor {INDEX_FILE}", file=self.name)

    def _read_header(self, undo: ExitStack, file: str) -> tuple[TensorSource, ...]:
        if file not in self._names:
            raise CheckpointError("is named by the index and does not exist", file=file)
        source = undo.enter_context(SourceFile.open(self._folder, file))
        self._sources[file] = source
        prefix = source.read(0, PREFIX_BYTES)
        length = header_length(prefix, file=file, file_bytes=source.nbytes)
        raw = source.read(PREFIX_BYTES, length)
        self._headers[file] = ParsedHeader(len(prefix) + len(raw), sha256(prefix + raw).digest())
        return parse_header(raw, file=file, file_bytes=source.nbytes)

    def _read_assets(self) -> dict[str, bytes]:
        assets: dict[str, bytes] = {}
        left = ASSET_LIMIT_BYTES
        for name in sorted(ASSET_FILES & self._names):
            assets[name] = self._read_document(name, left)
            left -= len(assets[name])
        if CONFIG_FILE not in assets:
            raise CheckpointError("is missing", file=CONFIG_FILE)
        return assets

    def _read_optional(self, name: str, limit_bytes: int) -> bytes | None:
        return self._read_document(name, limit_bytes) if name in self._names else None

    def _read_document(self, name: str, limit_bytes: int) -> bytes:
        with SourceFile.open(self._folder, name) as source:
            self._identities[name] = source.identity
            return source.read_all(limit_bytes)


def parse_config(raw: bytes) -> dict[str, object]:
    """What config.json says; raises CheckpointError if it is no JSON object, or is out of bounds."""
    if len(raw) > CONFIG_LIMIT_BYTES:
        raise CheckpointError(f"has {len(raw)} bytes, {CONFIG_LIMIT_BYTES} are allowed", file=CONFIG_FILE)
    return parse_object(raw, file=CONFIG_FILE, entries=_CONFIG_ENTRIES)


def open_checkpoint(roots: Sequence[Path], name: str) -> Checkpoint:
    """Open the checkpoint folder `name` in the first of the model roots that has it.  Blocking.

    Raises UnknownVersion if none has, CheckpointError if the folder is malformed or leads out.
    """
    for root in roots:
        if os.path.lexists(root / name):
            return Checkpoint(Folder.open(root, name))
    raise UnknownVersion(
        f"no folder {name!r} below {', '.join(str(root) for root in roots) or 'any model root'}", name=name
    )


def open_directory(directory: Path) -> Checkpoint:
    """Open the checkpoint in any directory, with the caller's own rights; for command-line tools."""
    return Checkpoint(Folder.anywhere(directory))
