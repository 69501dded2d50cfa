"""What the engine does to memory: it never writes to weights, and a version that goes leaves nothing."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inferd.engine.protocol import SamplingParams
from inferd.engine.transformers_engine import EngineSettings, TransformersEngine
from shared.errors import WarmupFailed
from tests.unit.engine.checkpoints import make_checkpoint, read_tensors, tag_of
from tests.unit.engine.sessions import EngineSession

from . import readonly_weights
from .engine_cases import DEVICE, answers_of, needs_cuda, on_device, opened, prompts_of, serve, versions

pytestmark = needs_cuda
REBUILDS = 25


@pytest.fixture
def session() -> Iterator[EngineSession]:
    with opened() as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def test_parameters_are_the_tensors_and_are_never_written(session: EngineSession, folder: Path) -> None:
    (tensors,) = versions(folder, 1)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    places = {tensor.data_ptr() for tensor in tensors.values()}
    engine = serve(session, folder, tensors)
    module = engine._models[0].module
    assert {parameter.data_ptr() for parameter in module.parameters()} <= places
    wishes = SamplingParams(100, seed=1, ignore_eos=True)
    answers_of(session, engine, prompts_of(9), wishes)
    assert engine.load().steps >= 100
    assert {name for name in tensors if not torch.equal(tensors[name], before[name])} == set()
    assert {name for name, tensor in tensors.items() if tensor._version} == set()


def test_it_serves_from_memory_that_can_only_be_read(session: EngineSession, tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.bfloat16)
    folders = [make_checkpoint(tmp_path / str(dtype), dtype=dtype) for dtype in dtypes]
    done = run_readonly("serve", *folders)
    assert done.returncode == 0, done.stderr
    exact, rounded = json.loads(done.stdout)
    (tensors,) = versions(folders[0], 1)
    engine = serve(session, folders[0], tensors)
    assert exact == answers_of(session, engine, readonly_weights.PROMPTS, readonly_weights.PARAMS)
    # In bfloat16 two runs may differ by what shared a step; that it ran at all is the point there.
    assert [len(answer) for answer in rounded] == [len(answer) for answer in exact]


def test_a_write_to_such_memory_ends_the_process(folder: Path) -> None:
    done = run_readonly("write", folder)
    assert done.returncode != 0
    assert "written" not in done.stdout


def run_readonly(what: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", readonly_weights.__name__, what, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_rebuilding_leaves_memory_where_it_was(session: EngineSession, folder: Path) -> None:
    first, second = versions(folder, 2)
    engine = serve(session, folder, first, max_sequences=4)
    prompts = prompts_of(4)
    after: list[tuple[int, int, int]] = []
    for number in range(REBUILDS):
        session.build(engine, 1, second, folder, f"{number % 8 + 1}")
        engine.warm(1)
        answers_of(session, engine, prompts, SamplingParams(3, temperature=0), slot=1)
        engine.retire(1)
        gc.collect()
        torch.cuda.synchronize(DEVICE)
        free, _ = torch.cuda.mem_get_info(DEVICE)
        after.append((torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE), -free))
    settled = after[REBUILDS // 5]
    assert after[-1] == settled


def test_what_is_retired_is_not_read_any_more(session: EngineSession, folder: Path) -> None:
    first, second = versions(folder, 2)
    engine = serve(session, folder, first)
    session.build(engine, 1, second, folder, "1")
    engine.warm(1)
    with engine._lanes.stepping():
        torch.cuda._sleep(400_000_000)  # stands for a step that is still under way
    steps = engine._lanes._steps
    assert steps is not None
    assert not steps.query()
    engine.retire(1)
    assert steps.query()


def test_a_slot_is_built_and_warm_when_the_calls_return(session: EngineSession, folder: Path) -> None:
    (tensors,) = versions(folder, 1)
    engine = session.open()
    session.build(engine, 0, tensors, folder, "0")
    stream = engine._lanes._preparing
    assert stream is not None
    assert stream.query()
    engine.warm(0)
    assert stream.query()


def test_the_cache_takes_its_share_of_what_is_free(folder: Path) -> None:
    engine = TransformersEngine(EngineSettings(kv_cache_share=0.01))
    free, _ = torch.cuda.mem_get_info(DEVICE)
    engine.build(0, tag_of("v1"), on_device(read_tensors(folder)), folder)
    cache = engine._cache
    assert cache is not None
    assert cache.geometry.device == DEVICE
    held = cache.blocks * cache.block_tokens * cache.geometry.bytes_per_token
    assert 0.008 * free < held <= 0.01 * free


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_weight_is_found(session: EngineSession, folder: Path, value: float) -> None:
    (tensors,) = versions(folder, 1)
    engine = session.open()
    name = "model.embed_tokens.weight"
    tensors[name][255, 3] = value  # a row that no trial prompt uses
    session.build(engine, 0, tensors, folder, "0")
    with pytest.raises(WarmupFailed) as caught:
        engine.warm(0)
    assert not engine._graphs
    assert caught.value.facts["tensor"] or caught.value.facts["module"]
