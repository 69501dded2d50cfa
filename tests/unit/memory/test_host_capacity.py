"""How much memory the host backend believes it may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import DriverError
from shared.memory.host_capacity import available_bytes

GIB = 1 << 30


class Machine:
    """A copy of the files that the kernel shows, below a folder."""

    def __init__(self, root: Path, *, available_kib: int, group: str) -> None:
        self.proc = root / "proc"
        self.cgroup = root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        meminfo = f"MemTotal:  99999999 kB\nMemFree:  1 kB\nMemAvailable:  {available_kib} kB\n"
        (self.proc / "meminfo").write_text(meminfo)
        (self.proc / "self" / "cgroup").write_text(f"4:memory:/old/style\n0::{group}\n")

    def limit(self, group: str, limit: str, used: int, inactive_file: int = 0) -> None:
        folder = self.cgroup / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_anon 7\ninactive_file {inactive_file}\n")

    def available_bytes(self) -> int:
        return available_bytes(self.proc, self.cgroup)


def test_the_kernels_estimate_without_a_group(tmp_path: Path) -> None:
    assert Machine(tmp_path, available_kib=1024, group="/").available_bytes() == 1 << 20


def test_the_tightest_group_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_kib=64 << 20, group="/system.slice/loaderd.service")
    machine.limit("system.slice/loaderd.service", "max", used=GIB)
    assert machine.available_bytes() == 64 * GIB
    machine.limit("system.slice/loaderd.service", str(8 * GIB), used=3 * GIB)
    assert machine.available_bytes() == 5 * GIB
    machine.limit("system.slice", str(6 * GIB), used=4 * GIB)
    assert machine.available_bytes() == 2 * GIB


def test_page_cache_of_a_group_is_available(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_kib=64 << 20, group="/a")
    machine.limit("a", str(8 * GIB), used=8 * GIB, inactive_file=2 * GIB)
    assert machine.available_bytes() == 2 * GIB


def test_a_group_over_its_limit_has_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_kib=64 << 20, group="/a")
    machine.limit("a", str(GIB), used=2 * GIB)
    assert machine.available_bytes() == 0


def test_a_group_outside_the_visible_tree_does_not_lead_out_of_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_kib=1024, group="/../../a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "memory.max").write_text("1\n")
    machine.limit("a", str(GIB), used=GIB - 4096)
    assert machine.available_bytes() == 4096


def test_a_kernel_that_does_not_tell_is_an_error(tmp_path: Path) -> None:
    machine = Machine(tmp_path, available_kib=1024, group="/")
    (machine.proc / "meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(DriverError):
        machine.available_bytes()
    (machine.proc / "meminfo").unlink()
    with pytest.raises(DriverError):
        machine.available_bytes()


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
