"""Every test of this folder must leave fds and mappings as it found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch  # noqa: F401 - opened once here, so that no test is blamed for what importing it opens

from tests.support.gpu import warm_up_gpu
from tests.support.procfs import open_fds

from .resources import slab_mappings

warm_up_gpu()  # for the same reason


@pytest.fixture(autouse=True)
def _resources_return_to_baseline() -> Iterator[None]:
    fds = open_fds()
    yield
    assert slab_mappings() == ()
    assert open_fds() == fds
