"""The entry point of loaderctl: imports everything else where Ctrl-C is expected already."""

from __future__ import annotations

import sys


def main() -> None:
    """Run one command and exit with its code; Ctrl-C is quiet while modules are imported, too."""
    try:
        from loaderd.ctl.app import run

        run()
    except KeyboardInterrupt:
        sys.exit(130)  # ExitCode.INTERRUPTED, which may not be there yet


if __name__ == "__main__":
    main()
