"""Two hundred pushes leave both daemons where they were.

Three versions in turn, so that each push loads, maps, builds and warms: a push of the version that is
retained would only be a commit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support import procfs
from tests.support.serving_host import ServingHost, serving_host

VERSIONS = ("v1", "v2", "v3")
ROUNDS = 67
POOL = (os.cpu_count() or 1) + 4
"""Threads of asyncio's own executor."""

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
    weight_mappings: int
    weight_bytes: int

    @classmethod
    def by(cls, pid: int) -> Held:
        mappings = procfs.weight_mappings(pid)
        return cls(
            fds=dict(procfs.fd_kinds(pid)),
            weight_mappings=len(mappings),
            weight_bytes=sum(mapping.rss_bytes for mapping in mappings),
        )


def test_two_hundred_pushes_leave_nothing(host: ServingHost, expected: Expected) -> None:
    def rounds(count: int) -> None:
        for _ in range(count):
            for version in VERSIONS:
                assert host.push(version).bytes_read > 0

    def pids() -> tuple[int, int]:
        return host.loaderd.pid, host.inferds["a"].pid

    rounds(4)  # thread pools and allocators reach their size
    before = [Held.by(pid) for pid in pids()]
    threads = [procfs.thread_count(pid) for pid in pids()]
    private = [procfs.private_bytes(pid) for pid in pids()]
    used = host.status().memory[0].used_bytes
    epoch = host.model().epoch
    rounds(ROUNDS)
    assert host.model().epoch == epoch + len(VERSIONS) * ROUNDS
    assert [Held.by(pid) for pid in pids()] == before
    # A pool makes a thread whenever none is idle, up to its size.
    assert max(procfs.thread_count(pid) - was for pid, was in zip(pids(), threads, strict=True)) <= POOL
    growth = [procfs.private_bytes(pid) - was for pid, was in zip(pids(), private, strict=True)]
    assert max(growth) < GROWTH_BYTES
    status = host.status()
    assert status.memory[0].used_bytes == used
    assert sorted((v.tag.version, v.state) for v in status.versions) == [("v2", "retained"), ("v3", "active")]
    with host.client() as client:
        answer = client.ask(PROMPTS[0], NEW_TOKENS)
    assert answer.text == expected["v3"][PROMPTS[0]]
