"""The `loaderd` command."""

from __future__ import annotations

from pathlib import Path

from loaderd.config import LoaderdConfig
from loaderd.daemon import serve
from shared.config_file import load_config
from shared.daemon_command import run_daemon_command

SUMMARY = "Own weight memory: load checkpoints, verify every byte, hand them to inference daemons."


def _load(path: Path) -> LoaderdConfig:
    return load_config(path, LoaderdConfig)


def main() -> None:
    """Entry point."""
    run_daemon_command("loaderd", SUMMARY, _load, serve)


if __name__ == "__main__":
    main()
