"""Which folders below the model roots look like checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loaderd.checkpoint.folder import Folder
from loaderd.checkpoint.names import INDEX_FILE, SEAL_FILE, SINGLE_FILE, is_shard_name
from loaderd.checkpoint.source_file import SourceFile
from shared.errors import ChangeoverError
from shared.ids import check_name


@dataclass(frozen=True, slots=True)
class FolderSummary:
    """A folder that could be pushed, judged by its listing and whether its seal can be read."""

    name: str
    root: Path
    nbytes: int  # of all .safetensors files that open
    is_sealed: bool  # it has a seal that can be read
    seal_fault: str = ""  # why the seal that it has cannot be


def list_folders(roots: Sequence[Path], seal_fault: Callable[[Folder], str]) -> tuple[FolderSummary, ...]:
    """Checkpoint folders by name; of two with one name, the one that `open_checkpoint` would take.

    `seal_fault` says what is wrong with a folder's seal, or nothing.  Folders that cannot be opened
    are left out: a push of one says why.  Blocking.
    """
    found: dict[str, FolderSummary] = {}
    for root in roots:
        try:
            with Folder.open(root, ".") as listing:
                names = listing.names()
        except ChangeoverError:
            continue
        for name in names - found.keys():
            summary = _summarise(root, name, seal_fault)
            if summary is not None:
                found[name] = summary
    return tuple(found[name] for name in sorted(found))


def _summarise(root: Path, name: str, seal_fault: Callable[[Folder], str]) -> FolderSummary | None:
    try:
        check_name(name, "folder")
        with Folder.open(root, name) as folder:
            files = folder.names()
            if not files & {SINGLE_FILE, INDEX_FILE}:
                return None
            nbytes = 0
            for file in sorted(files):
                if is_shard_name(file):
                    with SourceFile.open(folder, file) as source:
                        nbytes += source.nbytes
            fault = seal_fault(folder) if SEAL_FILE in files else ""
    except ChangeoverError:
        return None
    return FolderSummary(name, root, nbytes, SEAL_FILE in files and not fault, fault)
