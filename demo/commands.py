"""How the demo starts the project's programs."""

from __future__ import annotations

import sys
from pathlib import Path

_ENTRIES = {"loaderd": "loaderd.main", "inferd": "inferd.main", "loaderctl": "loaderd.ctl.main"}


def program(name: str) -> list[str]:
    """The start of a command line for one of the project's programs, run by this interpreter.

    The installed script where there is one; from a bare checkout, the same entry point by its module.
    """
    script = Path(sys.executable).parent / name
    if script.is_file():
        return [str(script)]
    entry = f"import sys; from {_ENTRIES[name]} import main; sys.exit(main())"
    return [sys.executable, "-c", entry]
