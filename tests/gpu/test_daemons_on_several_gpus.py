"""loaderd and an inferd on each of two GPUs, as processes: one push, one decision, equal answers."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from loaderd.nvml import open_nvml
from loaderd.seal.create import seal_directory
from shared.control import Verify, VerifyReport
from shared.ids import DeviceId, VersionTag
from tests.support.gpu import visible_gpus
from tests.support.serving_host import MODEL, ServingHost, serving_host
from tests.support.tiny_models import derive, everything_scaled, make_model

PROMPTS = ("The capital of France is", "Once upon a time there was a", "def fibonacci(n):")
NEW_TOKENS = 16
PREPARE_S = 40.0
"""Long enough for kernels to be compiled, short enough to wait for one that hangs."""

SETTLES_WITHIN_S = 20.0
SLACK_BYTES = 64 << 20
"""What a driver may keep for itself between two looks; one version of the model is more."""


@pytest.fixture(scope="module")
def gpus(gpu: DeviceId) -> tuple[DeviceId, ...]:
    if len(visible_gpus()) < 2:
        pytest.skip("fewer than two CUDA devices")
    return visible_gpus()[:2]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model root with tiny-v1 to v3 of 76 MB each, that share no tensor."""
    root = tmp_path_factory.mktemp("several")
    v1 = make_model(root / "tiny-v1", hidden=384, intermediate=1536, layers=8)
    seal_directory(v1)
    derive(v1, root / "tiny-v2", everything_scaled(1.25))
    derive(v1, root / "tiny-v3", everything_scaled(0.75))
    return root


@pytest.fixture(scope="module")
def host(root: Path, gpus: tuple[DeviceId, ...]) -> Iterator[ServingHost]:
    named = ", ".join(f'"{each}"' for each in gpus)
    config = (
        f'backend = "cuda"\nadopt_grace_s = 20.0\n[models.{MODEL}]\ndevices = [{named}]\n'
        f"prepare_timeout_s = {PREPARE_S}\ndrain_timeout_s = 2.0\n"
    )
    with serving_host(root, config) as host:
        host.start_loaderd()
        for name, device in zip("ab", gpus, strict=True):
            host.start_inferd(name, more=f'backend = "cuda"\ndevice = "{device}"', engine="max_sequences = 4")
        host.await_attached("a", "b")
        yield host


def free_bytes(gpus: tuple[DeviceId, ...]) -> list[int]:
    nvml = open_nvml()
    if nvml is None:
        pytest.skip("NVML is not there")
    try:
        return [nvml.read(device).free_bytes or 0 for device in gpus]
    finally:
        nvml.close()


def answers(host: ServingHost, name: str) -> list[tuple[str, str]]:
    """What an inferd answers: version and text."""
    with host.client(name) as client:
        found = [client.ask(prompt, NEW_TOKENS) for prompt in PROMPTS]
    return [(answer.version, answer.text) for answer in found]


def has_copies(host: ServingHost, tags: Sequence[VersionTag | None], gpus: Sequence[DeviceId]) -> bool:
    """Whether each of these versions is resident on all of these GPUs."""
    copies = {version.tag.to_tag(): set(version.devices) for version in host.status().versions}
    return all(tag is not None and copies.get(tag) == set(gpus) for tag in tags)


def test_one_push_serves_on_both_and_reads_each_byte_once(
    host: ServingHost, root: Path, gpus: tuple[DeviceId, ...]
) -> None:
    report = host.push("v1")
    host.await_serving("v1", "a", "b")
    assert report.inferds_committed == 2
    content = sum(path.stat().st_size for path in (root / "tiny-v1").glob("*.safetensors"))
    assert report.bytes_read <= content
    status = host.status()
    (version,) = status.versions
    assert version.devices == gpus
    assert report.bytes_replicated == version.nbytes
    assert {m.device: m.used_bytes for m in status.memory} == dict.fromkeys(gpus, version.nbytes)
    assert {(h.inferd, h.device) for h in version.holders} == set(zip("ab", gpus, strict=True))
    assert answers(host, "a") == answers(host, "b")
    assert {version for version, _ in answers(host, "a")} == {str(host.active())}


def test_the_way_back_and_forth_is_one_decision(host: ServingHost) -> None:
    before = answers(host, "a")
    host.push("v2")
    host.await_serving("v2", "a", "b")
    assert answers(host, "a") == answers(host, "b") != before
    report = host.rollback()
    host.await_serving("v1", "a", "b")
    assert (report.inferds_committed, report.bytes_read, report.bytes_replicated) == (2, 0, 0)
    assert answers(host, "a") == answers(host, "b") == before


def test_a_gpu_that_does_not_prepare_keeps_both_on_the_old_version(
    host: ServingHost, gpus: tuple[DeviceId, ...]
) -> None:
    serving = host.active()
    used = {m.device: m.used_bytes for m in host.status().memory}
    host.inferds["b"].signal(signal.SIGSTOP)
    try:
        report = host.ended(host.start_push("v3"), within_s=2 * PREPARE_S)
    finally:
        host.inferds["b"].signal(signal.SIGCONT)
    assert report.state == "failed"
    assert report.error is not None
    assert "inferd b" in report.error.message
    assert host.active() == serving
    assert serving is not None
    host.await_serving(serving.ref.version, "a", "b")
    host.awaited(
        lambda: {m.device: m.used_bytes for m in host.status().memory} == used, "the failed push to be freed"
    )
    assert answers(host, "a") == answers(host, "b")


def test_verify_hashes_both_copies(host: ServingHost, gpus: tuple[DeviceId, ...]) -> None:
    report = host.control.ask(Verify(name="v1"), VerifyReport, 60.0)
    assert (report.devices, report.damaged) == (gpus, ())


def test_a_restarted_loaderd_takes_both_copies_back(host: ServingHost, gpus: tuple[DeviceId, ...]) -> None:
    before = answers(host, "a")
    serving, retained = host.active(), host.retained()
    host.kill_loaderd()
    assert answers(host, "a") == answers(host, "b") == before
    host.start_loaderd()
    host.awaited(lambda: has_copies(host, (serving, retained), gpus), "both versions to be adopted")
    kinds = [entry.kind for entry in host.history()]
    assert "version.replicated" not in kinds
    assert host.rollback().inferds_committed == 2
    assert host.rollback().inferds_committed == 2
    assert answers(host, "a") == answers(host, "b") == before


def test_swaps_leave_the_memory_of_both_where_it_was(host: ServingHost, gpus: tuple[DeviceId, ...]) -> None:
    for version in ("v3", "v2", "v3"):
        host.push(version)
    before = free_bytes(gpus)
    for version in ("v2", "v1", "v3") * 2:
        host.push(version)
    end = time.monotonic() + SETTLES_WITHIN_S
    while any(now < then - SLACK_BYTES for now, then in zip(free_bytes(gpus), before, strict=True)):
        assert time.monotonic() < end, (before, free_bytes(gpus))
        time.sleep(0.2)  # the driver says nothing when it has taken memory back


def test_a_copy_is_made_again_where_its_inferd_died_with_loaderd(
    host: ServingHost, gpus: tuple[DeviceId, ...]
) -> None:
    """Last: the inferd of the second GPU does not come back."""
    before = answers(host, "a")
    serving = host.active()
    host.kill_loaderd()
    host.inferds.pop("b").kill()
    host.start_loaderd()
    host.awaited(lambda: has_copies(host, (serving,), gpus), "the second GPU to have a copy again")
    assert "version.replicated" in [entry.kind for entry in host.history()]
    assert answers(host, "a") == before
    host.start_inferd("c", more=f'backend = "cuda"\ndevice = "{gpus[1]}"', engine="max_sequences = 4")
    assert serving is not None
    host.await_serving(serving.ref.version, "a", "c")
    assert answers(host, "c") == before
