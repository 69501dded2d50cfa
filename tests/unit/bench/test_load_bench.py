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

import pytest
import torch
from safetensors.torch import load_file

from loaderd.checkpoint.checkpoint import open_directory
from loaderd.seal.create import seal_directory
from tests.bench import load
from tests.bench.load_cache import fill, residency
from tests.bench.load_changeover import CHANGEOVER
from tests.bench.load_loaders import PEERS, Loader, Resident, Setting
from tests.bench.load_model import BLOCK_BYTES, Model, pieces, write_model
from tests.bench.load_report import OURS, TMPFS, Verification
from tests.bench.load_schedule import Step
from tests.bench.load_worker import Job, difference, measure_loads

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


def job(folder: Path, what: str) -> Job:
    return Job(TMPFS, what, "host", SMALL.gb, str(folder), SMALL.gb, str(folder), 2, 2, 1 << 30)


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
    *_, series = measure_loads(job(folder, OURS), CHANGEOVER)
    assert {each.verification: (each.error, each.wrong) for each in series} == dict.fromkeys(
        Verification, ("", "")
    )
    for each in series:
        assert len(each.seconds) == 2
        assert each.bytes == SMALL.nbytes
        assert each.is_right
        assert all(sum(part.values()) > 0 for part in each.parts)


def test_safetensors_is_measured_with_each_of_its_settings(folder: Path) -> None:
    *_, series = measure_loads(job(folder, "safetensors"), PEERS["safetensors"])
    assert [(each.setting["backend"], each.is_right) for each in series] == [("mmap", True), ("pread", True)]


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
    *_, (series,) = measure_loads(job(folder, "careless"), loader)
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
    *_, (failed, measured) = measure_loads(job(folder, "picky"), loader)
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
        device="host", gb=SMALL.gb, budget_s=300, repeats=1, our_repeats=1, own_format_gb=1
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
    run.take(Step(TMPFS, "safetensors"))
    assert run.report["failures"] == [{"loader": "safetensors", "place": TMPFS, "reason": reason}]


def test_a_loader_that_hangs_is_ended(run: load.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load, "_STEP_S", 2)
    mark = tmp_path / "pid"
    _instead_of_the_worker(
        monkeypatch, f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    run.take(Step(TMPFS, "safetensors"))
    assert [failure["reason"] for failure in run.report["failures"]] == ["took longer than 2 s"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_what_a_loader_measured_before_it_crashed_is_kept(
    run: load.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"limits": [{"what": "parallel pread"}]}
    _instead_of_the_worker(
        monkeypatch, f"import os, sys; open(sys.argv[2], 'w').write('{json.dumps(limits)}'); os.abort()"
    )
    run.take(Step(TMPFS, "limits"))
    assert run.report["limits"] == limits["limits"]
    assert [failure["loader"] for failure in run.report["failures"]] == ["limits"]


def test_steps_that_there_is_no_time_for_are_named(run: load.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "time", SimpleNamespace(monotonic=lambda: 1e12))
    run.take(Step(TMPFS, "safetensors"))
    run.take(Step(TMPFS, "instanttensor"))
    assert [each["reason"] for each in run.report["skipped"]] == ["no time left"] * 2


def test_a_loader_that_knows_no_host_memory_is_skipped_there(run: load.Run) -> None:
    run.take(Step(TMPFS, "instanttensor"))
    assert [each["reason"] for each in run.report["skipped"]] == ["does not load to host"]


def test_the_whole_run_writes_its_report_and_leaves_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files, out = tmp_path / "files", tmp_path / "out.json"
    files.mkdir()
    command = [
        *("load", "run", "--gb", "0.003", "--tmpfs", str(files), "--disk", str(files), "--repeats", "1"),
        *("--our-repeats", "1", "--only", TMPFS, "--out", str(out)),
        *("--skip-loaders", ",".join(PEERS.keys() - {"safetensors"})),
    ]
    monkeypatch.setattr(sys, "argv", command)
    load.main()
    assert list(files.iterdir()) == []
    report = json.loads(out.read_text())
    assert {entry["loader"] for entry in report["loads"]} == {OURS, "safetensors"}
    assert all(entry["is_right"] for entry in report["loads"])
    assert report["failures"] == report["skipped"] == []
    assert {entry["what"] for entry in report["limits"]} == {"memory copy", "parallel pread"}
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
