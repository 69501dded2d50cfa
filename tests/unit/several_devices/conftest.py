"""A host with two devices, an inferd on each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.device_host import ALL_OTHER, DeviceHost, device_host, write_version


@pytest.fixture
def run(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scenario on a host of `device_host`'s options, with v1 and an entirely different v2."""

    def run(scenario: Callable[[DeviceHost], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async with device_host(short_path, monkeypatch, **options) as host:
                write_version(host.folder / "models", "v1")
                write_version(host.folder / "models", "v2", ALL_OTHER)
                await scenario(host)

        asyncio.run(main())

    return run
