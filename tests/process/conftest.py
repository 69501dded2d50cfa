"""Checkpoints that all process tests share, and a host per module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from loaderd.seal.create import seal_directory
from tests.support.reference import greedy_texts
from tests.support.serving_host import ServingHost, serving_host
from tests.support.tiny_models import derive, low_rank, make_model

PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969 the first people",
    "To be or not to be",
)
NEW_TOKENS = 24

Expected = dict[str, dict[str, str]]
"""Version, prompt → text."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model root with tiny-v1 (two shards), tiny-v2 and tiny-v3, all sealed.  Not to be changed."""
    root = tmp_path_factory.mktemp("models")
    v1 = make_model(root / "tiny-v1", is_sharded=True)
    assert len(list(v1.glob("*.safetensors"))) == 2
    seal_directory(v1)
    derive(v1, root / "tiny-v2", low_rank(2))
    derive(v1, root / "tiny-v3", low_rank(3))
    return root


@pytest.fixture(scope="session")
def expected(models: Path) -> Expected:
    """What each version must answer, from `transformers` itself."""
    answers = {v: greedy_texts(models / f"tiny-{v}", PROMPTS, NEW_TOKENS) for v in ("v1", "v2", "v3")}
    for prompt in PROMPTS:
        assert len({answers[version][prompt] for version in answers}) == len(answers)
    return answers


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[ServingHost]:
    """loaderd and one inferd, on which no version is yet; a module that needs others has its own."""
    with serving_host(models) as host:
        host.start_loaderd()
        host.start_inferd()
        yield host
