"""Through both daemons, greedy answers in float32 are token for token those of `transformers`' generate.

With CHANGEOVER_TEST_MODEL_F32 naming the real model's folder it is that model, else a tiny one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loaderd.seal.create import seal_directory
from tests.support.reference import greedy_texts
from tests.support.serving_host import ServingHost, serving_host
from tests.support.tiny_models import derive, low_rank, make_model
from tests.unit.engine.checkpoints import NEW_TOKENS, PROMPTS

REAL = os.environ.get("CHANGEOVER_TEST_MODEL_F32")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    v1 = root / "tiny-v1"
    if REAL is None:
        make_model(v1)
    else:
        shutil.copytree(REAL, v1)
    seal_directory(v1)
    derive(v1, root / "tiny-v2", low_rank(2))
    return root


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[ServingHost]:
    with serving_host(models) as host:
        host.start_loaderd()
        host.start_inferd(engine="max_sequences = 8")
        yield host


def test_alone_batched_and_after_a_swap_and_back(host: ServingHost, models: Path) -> None:
    expected = greedy_texts(Path(REAL) if REAL else models / "tiny-v1", PROMPTS, NEW_TOKENS)
    host.push("v1")
    v1 = str(host.active())

    def ask(prompt: str) -> tuple[str, str]:
        with host.client() as client:
            answer = client.ask(prompt, NEW_TOKENS)
            return answer.version, answer.text

    wanted = {prompt: (v1, text) for prompt, text in expected.items()}
    assert {prompt: ask(prompt) for prompt in PROMPTS} == wanted, "one at a time"
    with ThreadPoolExecutor(8) as clients:
        assert dict(zip(PROMPTS, clients.map(ask, PROMPTS), strict=True)) == wanted, "eight at a time"
    host.push("v2")
    others = {prompt: ask(prompt) for prompt in PROMPTS[:6]}
    assert {version for version, _ in others.values()} == {str(host.active())} != {v1}
    assert any(text != expected[prompt] for prompt, (_, text) in others.items()), "v2 is another model"
    host.rollback()
    with ThreadPoolExecutor(8) as clients:
        assert dict(zip(PROMPTS, clients.map(ask, PROMPTS), strict=True)) == wanted, "after v2 and back"
