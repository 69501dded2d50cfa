"""Two hundred pushes there and back leave both daemons where they were."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support import procfs
from tests.support.serving_host import ServingHost, serving_host

PAIRS = 100
GROWTH_BYTES = 24 << 20
"""Noise of two allocators: what each of 200 leaked versions of 0.3 MB would exceed twice over."""


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[ServingHost]:
    with serving_host(models, 'log_level = "warning"') as host:
        host.start_loaderd()
        host.start_inferd(more='log_level = "warning"')
        yield host


@dataclass(frozen=True, slots=True)
class Held:
    """What a daemon holds that must not grow at all."""

    fds: dict[str, int]
    threads: int
    weight_mappings: int
    weight_bytes: int

    @classmethod
    def by(cls, pid: int) -> Held:
        mappings = procfs.weight_mappings(pid)
        return cls(
            fds=dict(procfs.fd_kinds(pid)),
            threads=procfs.thread_count(pid),
            weight_mappings=len(mappings),
            weight_bytes=sum(mapping.rss_bytes for mapping in mappings),
        )


def test_two_hundred_pushes_leave_nothing(host: ServingHost, expected: Expected) -> None:
    def pair() -> None:
        for version in ("v1", "v2"):
            assert host.push(version).warnings is not None

    def pids() -> tuple[int, int]:
        return host.loaderd.pid, host.inferds["a"].pid

    pair()
    for _ in range(5):
        pair()  # thread pools and allocators reach their size
    before = [Held.by(pid) for pid in pids()]
    private = [procfs.private_bytes(pid) for pid in pids()]
    used = host.status().memory[0].used_bytes
    epoch = host.model().epoch
    for _ in range(PAIRS - 6):
        pair()
    assert host.model().epoch == epoch + 2 * (PAIRS - 6)
    assert [Held.by(pid) for pid in pids()] == before
    growth = [procfs.private_bytes(pid) - was for pid, was in zip(pids(), private, strict=True)]
    assert max(growth) < GROWTH_BYTES
    status = host.status()
    assert status.memory[0].used_bytes == used
    assert sorted((v.tag.version, v.state) for v in status.versions) == [("v1", "retained"), ("v2", "active")]
    with host.client() as client:
        answer = client.ask(PROMPTS[0], NEW_TOKENS)
    assert answer.text == expected["v2"][PROMPTS[0]]
