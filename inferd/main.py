"""The `inferd` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shared.config_file import load_config
from shared.errors import ConfigError
from shared.metrics import package_version
from shared.supervisor import EXIT_CONFIG, Stop, run_daemon


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"inferd {package_version()}")
        raise typer.Exit


def _run(
    config: Annotated[Path, typer.Option(help="Configuration file (TOML).")] = Path(
        "/etc/changeover/inferd.toml"
    ),
    check: Annotated[bool, typer.Option("--check", help="Check the configuration and end.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Map verified weights from loaderd, serve an OpenAI-compatible API and flip between two versions."""
    # Imported here: torch takes seconds, and --help needs none of it.
    from inferd.config import InferdConfig

    try:
        loaded = load_config(config, InferdConfig)
    except ConfigError as error:
        typer.echo(f"inferd: {error.message}", err=True)
        raise typer.Exit(EXIT_CONFIG) from error
    if check:
        typer.echo(f"{config} is well-formed")
        return
    from inferd.daemon import serve

    async def main(stop: Stop) -> None:
        await serve(loaded, stop)

    raise typer.Exit(run_daemon(main, log_level=loaded.log_level))


def main() -> None:
    """Entry point."""
    typer.run(_run)


if __name__ == "__main__":
    main()
