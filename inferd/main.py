"""The `inferd` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shared.config_file import load_config
from shared.daemon_command import run_daemon_command
from shared.supervisor import Stop

if TYPE_CHECKING:
    from inferd.config import InferdConfig

CUBLAS_WORKSPACES = ":4096:2:16:8"
"""KiB and number of cuBLAS's scratch buffers.  Its own choice on Hopper, 32 MiB a stream, makes no step
faster (docs/benchmarks)."""

SUMMARY = "Map verified weights from loaderd, serve an OpenAI-compatible API, flip between two versions."


def _load(path: Path) -> InferdConfig:
    # Imported here and below: torch takes seconds, and --help needs none of it.
    from inferd.config import InferdConfig

    return load_config(path, InferdConfig)


async def _serve(config: InferdConfig, stop: Stop) -> None:
    from inferd.daemon import serve

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACES)  # read when cuBLAS starts
    await serve(config, stop)


def main() -> None:
    """Entry point."""
    run_daemon_command("inferd", SUMMARY, _load, _serve)


if __name__ == "__main__":
    main()
