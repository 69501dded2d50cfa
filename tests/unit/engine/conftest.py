"""Checkpoints for engine tests: the real model where the environment names one, else a tiny one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .checkpoints import make_checkpoint
from .sessions import EngineSession


@pytest.fixture(scope="session", autouse=True)
def _modest_threads() -> None:
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied float32 model."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in bfloat16."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny-bf16"), dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def f32_folder(tiny_folder: Path) -> Path:
    """The real model in float32 if CHANGEOVER_TEST_MODEL_F32 names its folder."""
    return Path(os.environ.get("CHANGEOVER_TEST_MODEL_F32") or tiny_folder)


@pytest.fixture(scope="session")
def bf16_folder(tiny_bf16_folder: Path) -> Path:
    """The real model in bfloat16 if CHANGEOVER_TEST_MODEL_BF16 names its folder."""
    return Path(os.environ.get("CHANGEOVER_TEST_MODEL_BF16") or tiny_bf16_folder)


@pytest.fixture
def session() -> Iterator[EngineSession]:
    """Opens engines and, at the end, checks and stops them."""
    opened = EngineSession()
    yield opened
    opened.close()
