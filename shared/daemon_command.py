"""The command line that both daemons have."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from shared.errors import ConfigError
from shared.metrics import package_version
from shared.supervisor import EXIT_CONFIG, Stop, run_daemon


class _HasLogLevel(Protocol):
    @property
    def log_level(self) -> str: ...


Config = TypeVar("Config", bound=_HasLogLevel)


def run_daemon_command(
    name: str,
    summary: str,
    load: Callable[[Path], Config],
    serve: Callable[[Config, Stop], Awaitable[None]],
) -> None:
    """Parse the command line of daemon `name`, load its configuration and serve.

    Ends the process with the daemon's exit code.  `load` may import what is slow: `--help` does not call
    it.
    """

    parser = argparse.ArgumentParser(prog=name, description=summary)
    parser.add_argument("--version", action="version", version=f"%(prog)s {package_version()}")
    parser.add_argument(
        "--config",
        type=Path,
        default=Path(f"/etc/changeover/{name}.toml"),
        metavar="FILE",
        help="configuration file, TOML (default: %(default)s)",
    )
    parser.add_argument("--check", action="store_true", help="check the configuration and end")
    options = parser.parse_args()
    try:
        config = load(options.config)
    except ConfigError as error:
        print(f"{name}: {error.message}", file=sys.stderr)
        sys.exit(EXIT_CONFIG)
    if options.check:
        print(f"{options.config} is well-formed")
        return

    async def main(stop: Stop) -> None:
        await serve(config, stop)

    sys.exit(run_daemon(main, log_level=config.log_level))
