"""What is refused or freed is told so that an operator knows which version, why, and what to do."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from loaderd.chronicle import TROUBLE
from loaderd.config import ModelConfig
from loaderd.planning import open_checked
from loaderd.seal.create import seal_directory
from shared.control import Diff, Push
from shared.errors import ChangeoverError, CheckpointError
from shared.ids import VersionRef
from tests.support.signing import KeyPair
from tests.unit.checkpoint_files import write_single
from tests.unit.device_host import MODEL, A, DeviceHost, device_host, write_version

pytestmark = pytest.mark.usefixtures("plain_logs")

SIGN = "; if the folder is as it should be, sign it: `loaderctl seal DIR --key KEY`; else copy it again"
SEAL = "; if the folder is as it should be, seal it: `loaderctl seal DIR`; else copy it again"


@pytest.fixture
def run(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a scenario on a host with v1 and an inferd."""

    def run(scenario: Callable[[DeviceHost], Awaitable[None]]) -> None:
        async def main() -> None:
            async with device_host(short_path, monkeypatch, there=(A,)) as host:
                write_version(host.folder / "models", "v1")
                await host.attach("a", A)
                await scenario(host)

        asyncio.run(main())

    return run


@pytest.mark.parametrize(
    ("verify", "spoil", "told"),
    [
        (
            "signed",
            lambda folder: (folder / "model.sig").unlink(),
            f"toy-v1/model.sig: does not exist: the folder is not signed{SIGN}",
        ),
        (
            "signed",
            lambda folder: (folder / "README.md").write_text("new"),
            f"toy-v1/README.md: is in the folder and not in the signature{SIGN}",
        ),
        (
            "signed",
            lambda folder: (folder / "config.json").write_text("{}"),
            f": altered after signing{SIGN}",
        ),
        (
            "sealed",
            lambda folder: (folder / "seal.json").write_text("no"),
            f"toy-v1/seal.json: byte 0: is not valid JSON: Expecting value{SEAL}",
        ),
        ("digest", lambda folder: (folder / "config.json").write_text("{} "), SEAL),
        ("digest", lambda folder: (folder / "config.json").unlink(), "toy-v1/config.json: is missing"),
        (
            "sealed",
            lambda folder: (folder / "seal.json").unlink(),
            "toy-v1: has no seal.json, and toy is served sealed only (seal it: `loaderctl seal DIR`)",
        ),
    ],
)
def test_a_refused_folder_is_named_with_the_next_step(
    tmp_path: Path, keys: KeyPair, verify: str, spoil: Callable[[Path], object], told: str
) -> None:
    folder = write_single(tmp_path / "toy-v1", {"t": ("U8", (3,), b"abc")})
    seal_directory(folder, key=keys.signing)
    spoil(folder)
    config = ModelConfig.model_validate(
        {"verify": verify, "trusted_keys": (keys.trusted,) if verify == "signed" else ()}
    )
    with pytest.raises(CheckpointError) as caught:
        open_checked((tmp_path,), "toy-v1", VersionRef("toy", "v1"), config)
    assert caught.value.message.startswith("toy-v1")
    assert caught.value.message.endswith(told)


def test_a_push_that_is_refused_on_opening_is_in_the_history(run: Callable[..., None]) -> None:
    """As one that the plan refuses: whoever reads warnings only sees a folder that was tampered with."""

    async def scenario(host: DeviceHost) -> None:
        (host.folder / "models" / "toy-v1" / "seal.json").write_text("no")
        for dry_run in (True, False):
            assert "push.refused" not in host.kinds()
            with pytest.raises(CheckpointError) as caught:
                await host.loaderd.push(Push(name="toy-v1", dry_run=dry_run))
        entry = host.history()[-1]
        assert (entry.kind, entry.model, entry.version) == ("push.refused", MODEL, "v1")
        assert entry.cause == caught.value.message
        assert entry.kind in TROUBLE
        with pytest.raises(ChangeoverError, match=r"^toy-v1/seal\.json: byte 0: is not valid JSON"):
            await host.loaderd.inquiries.diff(Diff(before="toy-v1", after="toy-v1"))

    run(scenario)


def test_a_version_whose_folder_is_gone_is_told_after_a_restart(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        assert (await host.push("v1")).state == "done"
        await host.end("a")
        shutil.rmtree(host.folder / "models" / "toy-v1")
        before = len(host.history())
        await host.restart()
        await host.signal.until(lambda: any(e.kind == "operation.ended" for e in host.history()[before:]))
        reason = f"no folder 'toy-v1' below {host.folder / 'models'}"
        assert host.loaderd.ready().reason == (
            f"no verified version is active; restore of toy-v1 failed: {reason}"
        )
        operation = (await host.status()).models[0].operation
        assert operation is not None
        assert operation.error is not None
        assert (operation.kind, operation.state, operation.error.message) == ("restore", "failed", reason)

    run(scenario)


def test_the_second_copy_of_what_serves_is_told_apart(run: Callable[..., None]) -> None:
    async def scenario(host: DeviceHost) -> None:
        await host.push("v1")
        before = len(host.history())
        await host.push("v1")
        causes = [e.cause for e in host.history()[before:] if e.data.get("to") in ("draining", "freed")]
        assert causes == [
            "only this copy: the same content is active already",
            "only this copy: another of the same content is active",
        ]

    run(scenario)
