"""Whether a folder's seal can be read at all, asked often and by anyone: each seal is parsed once."""

from __future__ import annotations

from collections import OrderedDict

from loaderd.checkpoint.checkpoint import SEAL_LIMIT_BYTES
from loaderd.checkpoint.folder import Folder
from loaderd.checkpoint.names import SEAL_FILE
from loaderd.checkpoint.source_file import FileIdentity, SourceFile
from loaderd.seal.document import read_seal
from shared.errors import ChangeoverError

KEPT = 4096


class SealGlance:
    """Remembers what was wrong with each seal, by the identity of its file.  Used from one thread."""

    def __init__(self) -> None:
        self._faults: OrderedDict[FileIdentity, str] = OrderedDict()

    def fault(self, folder: Folder) -> str:
        """What is wrong with the folder's `seal.json`; empty if it can be read.  Blocking.

        Whether the folder holds what the seal says is not looked at.
        """
        try:
            with SourceFile.open(folder, SEAL_FILE) as source:
                if source.identity not in self._faults:
                    self._faults[source.identity] = _fault(source)
                    if len(self._faults) > KEPT:
                        self._faults.popitem(last=False)
                return self._faults[source.identity]
        except ChangeoverError as error:
            return error.message


def _fault(source: SourceFile) -> str:
    try:
        read_seal(source.read_all(SEAL_LIMIT_BYTES))
    except ChangeoverError as error:
        return error.message
    return ""
