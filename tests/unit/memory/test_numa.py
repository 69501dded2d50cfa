"""Which processors are near a device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.memory.numa import near_processors


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of four processors; this process may not use the last."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7)))
    (tmp_path / "online").write_text("0-1\n")
    for node, processors in enumerate(["0-1,4", "2,3,5-7"]):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(processors + "\n")
    return tmp_path


def test_the_processors_of_a_node_that_may_be_used(nodes: Path) -> None:
    assert near_processors(0, nodes) == {0, 1, 4}
    assert near_processors(1, nodes) == {2, 3, 5, 6}


@pytest.mark.parametrize("node", [-1, 2])
def test_an_unknown_node_is_near_nothing(nodes: Path, node: int) -> None:
    assert near_processors(node, nodes) == frozenset()


def test_one_node_is_as_near_as_another(nodes: Path) -> None:
    (nodes / "online").write_text("0\n")
    assert near_processors(0, nodes) == frozenset()


@pytest.mark.parametrize("text", ["", "x"])
def test_what_the_kernel_would_not_say_is_nothing(nodes: Path, text: str) -> None:
    (nodes / "node0" / "cpulist").write_text(text)
    assert near_processors(0, nodes) == frozenset()


def test_a_host_without_nodes(tmp_path: Path) -> None:
    assert near_processors(0, tmp_path) == frozenset()
