"""The loading benchmark for real, small and on the host: right bytes, wrong bytes, crashes and hangs."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from loaderd.checkpoint.checkpoint import open_directory
from loaderd.seal.create import seal_directory
from tests.bench import load
from tests.bench.load_cache import fill, residency
from tests.bench.load_changeover import CHANGEOVER
from tests.bench.load_limits import direct_limit, direct_shapes
from tests.bench.load_loaders import PEERS, Loader, Resident, Setting
from tests.bench.load_model import BLOCK_BYTES, Model, pieces, write_model
from tests.bench.load_report import CACHED, COLD, OURS, TMPFS, Verification
from tests.bench.load_schedule import COLD_SETS, Step
from tests.bench.load_series import difference
from tests.bench.load_worker import Job, measure_cold, measure_loads

SMALL = Model(0.003)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small operations: on a busy machine more threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("load") / "model"
    write_model(folder, SMALL)
    seal_directory(folder)
    return folder


def job(folder: Path, what: str, **more: Any) -> Job:
    whole = Job(
        what=what,
        device="host",
        places=(TMPFS, COLD),
        folders={TMPFS: [str(folder)], COLD: [str(folder)] * COLD_SETS},
        gb=SMALL.gb,
        cold_gb=SMALL.gb,
        small_folder=str(folder),
        small_gb=SMALL.gb,
        repeats=2,
        cold_rounds=2,
        first_set=1,
        shape={"threads": 2, "slot_bytes": 1 << 20},
        cores=2,
        own_format_bytes=1 << 30,
    )
    return replace(whole, **more)


def test_at_sixteen_gigabytes_the_model_is_llama_3_8b() -> None:
    model = Model(16)
    assert (model.width, model.nbytes, len(model.tensors)) == (4096, 16_060_522_496, 291)
    sizes = [sum(tensor.nbytes for tensor in part) for part in model.files.values()]
    assert len(sizes) == 4
    assert max(sizes) < 1.2 * min(sizes)
    assert [t for part in model.files.values() for t in part] == list(model.tensors)


@pytest.mark.parametrize("gb", [0.02, 0.5, 3])
def test_smaller_models_have_about_the_size_asked_for_and_no_two_equal_tensors(gb: float) -> None:
    model = Model(gb)
    assert model.nbytes == pytest.approx(gb * 1e9, rel=0.35)
    assert len({tensor.start_bytes for tensor in model.tensors}) == len(model.tensors)


def test_the_pieces_of_a_tensor_are_all_its_bytes() -> None:
    large = replace(Model(16).tensors[0], number=3)
    assert sum(piece.nbytes for piece in pieces(large)) == large.nbytes
    assert all(piece.nbytes == BLOCK_BYTES for piece in list(pieces(large))[:-1])


def test_the_checkpoint_is_one_that_loaderd_opens_and_nothing_in_it_is_shared(folder: Path) -> None:
    with open_directory(folder) as checkpoint:
        assert checkpoint.total_bytes == SMALL.nbytes
        assert {t.name for t in checkpoint.tensors} == {t.name for t in SMALL.tensors}
        assert len(set(seal_directory(folder).tensor_digests.values())) == len(SMALL.tensors)


def test_ours_is_measured_verified_and_not_and_every_byte_is_compared(folder: Path) -> None:
    *_, series = measure_loads(job(folder, OURS), TMPFS, CHANGEOVER)
    assert {each.verification: (each.error, each.wrong) for each in series} == dict.fromkeys(
        Verification, ("", "")
    )
    for each in series:
        assert len(each.seconds) == 2
        assert each.bytes == SMALL.nbytes
        assert each.is_right
        assert all(sum(part.values()) > 0 for part in each.parts)


def test_safetensors_is_measured_with_each_of_its_settings(folder: Path) -> None:
    *_, series = measure_loads(job(folder, "safetensors"), TMPFS, PEERS["safetensors"])
    assert [(each.setting["backend"], each.is_right) for each in series] == [("mmap", True), ("pread", True)]


def test_cold_loads_are_measured_between_direct_reads(folder: Path) -> None:
    *_, (series, direct) = measure_cold(job(folder, OURS), CHANGEOVER)
    assert [each.verification for each in series] == ["digest", "none"]
    assert (len(direct["seconds"]), direct["sets"]) == (5, [1, 0, 2, 1, 0])
    assert [each.sets for each in series] == [[2, 0], [1, 2]]
    rates = [direct["bytes"] / seconds / 1e9 for seconds in direct["seconds"]]
    assert [pair for each in series for pair in each.beside] == [
        pytest.approx(rates[at : at + 2]) for at in (0, 2, 1, 3)
    ]
    for each in series:
        assert (len(each.seconds), len(each.cached), each.is_right) == (2, 2, True)


def test_a_loader_that_fails_cold_keeps_what_it_measured(folder: Path) -> None:
    loads = []

    def loading(folder: Path, device: str, setting: Setting) -> Resident:
        loads.append(folder)
        if len(loads) == 3:  # one to warm up, one that counts
            raise RuntimeError("enough")
        return PEERS["safetensors"].load(folder, device, {"backend": "pread"})

    loader = Loader("tired", loading, lambda *_: [{}])
    *_, ((series,), direct) = measure_cold(job(folder, "tired", cold_rounds=4), loader)
    assert series.error == "RuntimeError: enough"
    assert len(loads) == 3, "not again"
    assert (len(series.seconds), len(series.beside), len(direct["seconds"])) == (1, 1, 3)


def test_direct_reads_with_all_shapes_read_every_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    sizes = [37 << 20, (12 << 20) + 5]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(bytes(size))
    read: list[tuple[int, int, int]] = []
    preadv = os.preadv

    def noting(fd: int, buffers: list[memoryview], at: int) -> int:
        got = preadv(fd, buffers, at)
        read.append((os.fstat(fd).st_ino, at, got))
        return got

    monkeypatch.setattr(os, "preadv", noting)
    shapes = direct_shapes(paths, 2)
    assert {len(limit.seconds) for limit in shapes} == {2}
    assert len({str(limit.shape) for limit in shapes}) == len(shapes) == 6
    assert sum(limit.nbytes for limit in shapes) * 2 == pytest.approx(sum(sizes), rel=0.01)

    def check_all_read_once() -> None:
        for path in paths:
            end = 0
            for inode, at, got in sorted(read):
                if inode == path.stat().st_ino:
                    assert at == end
                    end += got
            assert end == path.stat().st_size // 4096 * 4096
        read.clear()

    check_all_read_once()
    assert direct_limit(paths, {"threads": 3, "slot_bytes": 1 << 20}).nbytes == 49 << 20
    check_all_read_once()


def _edit(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Resident]:
    def loading(folder: Path, device: str, setting: Setting) -> Resident:
        tensors: dict[str, torch.Tensor] = {}
        for path in SMALL.paths(folder):
            tensors |= {key: tensor.clone() for key, tensor in load_file(path).items()}
        tensors[name] = edit(tensors[name])
        return Resident(tensors)

    return loading


def _flip_last_byte(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(torch.uint8).reshape(-1)[-1] ^= 1
    return tensor


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (_flip_last_byte, "lm_head.weight differs in its bytes from 0 on"),
        (lambda tensor: tensor[1:], "lm_head.weight is torch.bfloat16"),
        (lambda tensor: tensor.view(torch.int16), "lm_head.weight is torch.int16"),
    ],
)
def test_a_loader_that_brings_other_bytes_is_marked(
    folder: Path, edit: Callable[[torch.Tensor], torch.Tensor], expected: str
) -> None:
    loader = Loader("careless", _edit("lm_head.weight", edit), lambda *_: [{}])
    *_, (series,) = measure_loads(job(folder, "careless"), TMPFS, loader)
    assert not series.is_right
    assert series.wrong.startswith(expected)


def test_tensors_that_are_missing_or_of_another_model_are_noticed() -> None:
    tensors = {t.name: torch.zeros(t.shape, dtype=torch.bfloat16) for t in SMALL.tensors}
    some = dict(list(tensors.items())[1:])
    assert difference(Resident(some), SMALL, is_part=False) == "model.embed_tokens.weight is missing"
    assert difference(Resident({}), SMALL, is_part=True) == ""
    assert difference(Resident({"other": tensors["lm_head.weight"]}), SMALL, is_part=True) == (
        "other is not in the model"
    )


def test_a_setting_that_fails_is_noted_and_the_others_are_measured(folder: Path) -> None:
    asked = []

    def loading(folder: Path, device: str, setting: Setting) -> Resident:
        if setting["threads"] == 1:
            asked.append(folder)
            raise RuntimeError("cannot with one")
        return PEERS["safetensors"].load(folder, device, {"backend": "pread"})

    loader = Loader("picky", loading, lambda *_: [{"threads": 1}, {"threads": 2}])
    *_, (failed, measured) = measure_loads(job(folder, "picky"), TMPFS, loader)
    assert (failed.error, failed.seconds) == ("RuntimeError: cannot with one", [])
    assert measured.is_right
    assert asked == [folder], "not again, it would fail again"


def test_what_was_just_read_is_in_the_page_cache(folder: Path) -> None:
    paths = SMALL.paths(folder)
    filled = fill(paths)
    assert filled.is_warm
    assert filled.nbytes == sum(path.stat().st_size for path in paths)
    assert residency([]).is_warm


@pytest.fixture
def run(tmp_path: Path) -> load.Run:
    options = argparse.Namespace(
        device="host",
        gb=SMALL.gb,
        cold_gb=SMALL.gb,
        budget_s=300,
        repeats=1,
        our_repeats=1,
        cold_rounds=1,
        own_format_gb=1,
    )
    return load.Run(options, tmp_path, tmp_path)


def _instead_of_the_worker(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(load, "WORKER", (sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os; print('about to', flush=True); os.abort()", "ended with -6: about to"),
        ("raise SystemExit(3)", "ended with 3: it said nothing"),
    ],
)
def test_a_loader_that_crashes_is_one_line_of_the_report(
    run: load.Run, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    _instead_of_the_worker(monkeypatch, code)
    run.take(Step("safetensors", (TMPFS,)))
    assert run.report["failures"] == [{"loader": "safetensors", "place": TMPFS, "reason": reason}]


def test_a_loader_that_hangs_is_ended(run: load.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "_SILENCE_S", 2)
    mark = tmp_path / "pid"
    _instead_of_the_worker(
        monkeypatch, f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    run.take(Step("safetensors", (TMPFS,)))
    assert [failure["reason"] for failure in run.report["failures"]] == ["silent for 2 s"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_what_a_loader_measured_before_it_crashed_is_kept(
    run: load.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"limits": [{"what": "parallel pread"}]}
    _instead_of_the_worker(
        monkeypatch, f"import os, sys; open(sys.argv[2], 'w').write('{json.dumps(limits)}'); os.abort()"
    )
    run.take(Step("limits", (TMPFS,)))
    assert run.report["limits"] == limits["limits"]
    assert [failure["loader"] for failure in run.report["failures"]] == ["limits"]


def test_after_a_crash_at_one_place_another_process_measures_the_next(
    run: load.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    _instead_of_the_worker(
        monkeypatch,
        f"""import json, os, sys
places = json.load(open(sys.argv[1]))["places"]
print(",".join(places), file=open({str(asked)!r}, "a"))
done = places[: places.index({CACHED!r})] if {CACHED!r} in places else places
json.dump({{"done": done}}, open(sys.argv[2], "w"))
if done != places: os.abort()""",
    )
    run.take(Step("safetensors", (TMPFS, CACHED)))
    assert [failure["place"] for failure in run.report["failures"]] == [CACHED]
    run.report["failures"].clear()
    run.take(Step("limits", (CACHED, TMPFS)))
    assert [failure["place"] for failure in run.report["failures"]] == [CACHED]
    assert asked.read_text().split("\n") == [f"{TMPFS},{CACHED}", f"{CACHED},{TMPFS}", TMPFS, ""]


def test_a_worker_that_is_not_done_when_the_time_is_up_is_ended(
    run: load.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_LEAST_S", 0)
    monkeypatch.setattr(run, "_deadline", load.time.monotonic() + 0.5)
    _instead_of_the_worker(
        monkeypatch,
        "import sys, time\nwhile True: open(sys.argv[2], 'w').write('{}'); time.sleep(0.2)",
    )
    run.take(Step("safetensors", (TMPFS,)))
    assert [failure["reason"][:7] for failure in run.report["failures"]] == ["cut off"]


def test_cold_loads_without_direct_reads_beside_them_are_not_measured(run: load.Run) -> None:
    run.take(Step("safetensors", (COLD,)))
    assert [each["reason"] for each in run.report["skipped"]] == ["no direct reads to compare with"]


def test_steps_that_there_is_no_time_for_are_named(run: load.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: 1e12))
    run.take(Step("safetensors", (TMPFS,)))
    run.take(Step("instanttensor", (TMPFS,)))
    assert [each["reason"] for each in run.report["skipped"]] == ["no time left"] * 2


def test_a_loader_that_knows_no_host_memory_is_skipped_there(run: load.Run) -> None:
    run.take(Step("instanttensor", (TMPFS,)))
    assert [each["reason"] for each in run.report["skipped"]] == ["does not load to host"]


def test_the_whole_run_writes_its_report_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, out = tmp_path / "files", tmp_path / "out.json"
    files.mkdir()
    command = [
        *("load", "run", "--gb", "0.003", "--tmpfs", str(files), "--disk", str(files), "--repeats", "1"),
        *("--our-repeats", "1", "--cold-gb", "0.003", "--cold-rounds", "1", "--out", str(out)),
        *("--only", f"{TMPFS},{COLD}"),
        *("--skip-loaders", ",".join(PEERS.keys() - {"safetensors"})),
    ]
    monkeypatch.setattr(load, "_SMALL_GB", 0.003)
    monkeypatch.setattr(sys, "argv", command)
    load.main()
    assert list(files.iterdir()) == []
    report = json.loads(out.read_text())
    assert {entry["loader"] for entry in report["loads"]} == {OURS, "safetensors"}
    assert all(entry["is_right"] for entry in report["loads"])
    assert report["failures"] == report["skipped"] == []
    assert {entry["what"] for entry in report["limits"]} == {"memory copy", "parallel pread", "direct read"}
    cold = [entry for entry in report["loads"] if entry["place"] == COLD]
    assert [len(entry["beside"]) for entry in cold] == [1, 1, 1]
    sets = [entry["sets"] for entry in report["limits"] if entry["what"] == "direct read"]
    assert sets == [[0, 2, 1], [2, 1]], "the second loader goes on in the rotation"
    assert capsys.readouterr().out.splitlines()[-1].startswith("safetensors")


def test_a_report_becomes_one_picture_whenever_it_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    from tests.bench.load_plot import draw
    from tests.unit.bench.test_load_report import load as entry
    from tests.unit.bench.test_load_report import report

    measured = report(entry(OURS, TMPFS, 40, "digest"), entry("other", TMPFS, 3))
    measured["model"]["shards"] = 4
    measured |= {"machine": {"cpu": "a CPU", "cores": 2}, "date": "2026-11-30"}
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    draw(measured, first)
    draw(measured, second)
    assert first.read_bytes() == second.read_bytes()
    for expected in ("changeover, digest", "other", "parallel pread, 40.0", "10.0 GB in 4 shards"):
        assert expected in first.read_text()
