"""The `loaderd` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loaderd.config import LoaderdConfig
from loaderd.daemon import serve
from shared.config_file import load_config
from shared.errors import ConfigError
from shared.metrics import package_version
from shared.supervisor import EXIT_CONFIG, Stop, run_daemon


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"loaderd {package_version()}")
        raise typer.Exit


def _run(
    config: Annotated[Path, typer.Option(help="Configuration file (TOML).")] = Path(
        "/etc/changeover/loaderd.toml"
    ),
    check: Annotated[bool, typer.Option("--check", help="Check the configuration and end.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Own weight memory: load checkpoints, verify every byte, hand them to inference daemons."""
    try:
        loaded = load_config(config, LoaderdConfig)
    except ConfigError as error:
        typer.echo(f"loaderd: {error.message}", err=True)
        raise typer.Exit(EXIT_CONFIG) from error
    if check:
        typer.echo(f"{config} is well-formed")
        return

    async def main(stop: Stop) -> None:
        await serve(loaded, stop)

    raise typer.Exit(run_daemon(main, log_level=loaded.log_level))


def main() -> None:
    """Entry point."""
    typer.run(_run)


if __name__ == "__main__":
    main()
