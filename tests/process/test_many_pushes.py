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

from shared.memory.host import HostBackend
from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support import procfs
from tests.support.cold_files import make_cold
from tests.support.serving_host import ServingHost, serving_host

VERSIONS = ("v1", "v2", "v3")
ROUNDS = 67
POOL = (os.cpu_count() or 1) + 4
"""Threads of asyncio's own executor."""

RING = "anon_inode:[io_uring]"

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
    """What a daemon holds that must not grow at all.

    Without io_uring rings: a reading thread gets one when it first reads past the page cache and the next
    one goes on with it.  When that is, is the kernel's: of files that are cached it says now and then that
    a page is not there."""

    fds: dict[str, int]
    weight_mappings: int
    weight_bytes: int

    @classmethod
    def by(cls, pid: int) -> Held:
        mappings = procfs.weight_mappings(pid)
        fds = procfs.fd_kinds(pid)
        del fds[RING]
        return cls(
            fds=dict(fds),
            weight_mappings=len(mappings),
            weight_bytes=sum(mapping.rss_bytes for mapping in mappings),
        )


def rings(host: ServingHost) -> list[int]:
    """io_uring rings of loaderd and inferd; their event loops have some of their own."""
    return [procfs.fd_kinds(pid)[RING] for pid in (host.loaderd.pid, host.inferds["a"].pid)]


def test_two_hundred_pushes_leave_nothing(host: ServingHost, expected: Expected) -> None:
    def rounds(count: int) -> None:
        for _ in range(count):
            for version in VERSIONS:
                assert host.push(version).bytes_read > 0
        host.status()  # answered when what the last push let go of is closed

    def pids() -> tuple[int, int]:
        return host.loaderd.pid, host.inferds["a"].pid

    loaderd_rings, inferd_rings = rings(host)  # nobody has read a weight yet
    rounds(4)  # thread pools and allocators reach their size
    before = [Held.by(pid) for pid in pids()]
    threads = [procfs.thread_count(pid) for pid in pids()]
    private = [procfs.private_bytes(pid) for pid in pids()]
    used = host.status().memory[0].used_bytes
    epoch = host.model().epoch
    rounds(ROUNDS)
    assert host.model().epoch == epoch + len(VERSIONS) * ROUNDS
    assert [Held.by(pid) for pid in pids()] == before
    assert rings(host)[0] <= loaderd_rings + HostBackend().readers
    assert rings(host)[1] == inferd_rings
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

    for _ in range(HostBackend().readers + 4):  # each reads all of its files past the page cache
        for version in VERSIONS:
            for path in (host.model_root / f"tiny-{version}").iterdir():
                make_cold(path)
            assert host.push(version).bytes_read > 0
    host.status()
    assert [Held.by(pid) for pid in pids()] == before
    assert rings(host)[0] <= loaderd_rings + HostBackend().readers
