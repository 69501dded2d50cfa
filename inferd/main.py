"""The `inferd` command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shared.config_file import load_config
from shared.daemon_command import run_daemon_command
from shared.supervisor import Stop

if TYPE_CHECKING:
    from inferd.config import InferdConfig

SUMMARY = "Map verified weights from loaderd, serve an OpenAI-compatible API, flip between two versions."


def _load(path: Path) -> InferdConfig:
    # Imported here and below: torch takes seconds, and --help needs none of it.
    from inferd.config import InferdConfig

    return load_config(path, InferdConfig)


async def _serve(config: InferdConfig, stop: Stop) -> None:
    from inferd.daemon import serve

    await serve(config, stop)


def main() -> None:
    """Entry point."""
    run_daemon_command("inferd", SUMMARY, _load, _serve)


if __name__ == "__main__":
    main()
