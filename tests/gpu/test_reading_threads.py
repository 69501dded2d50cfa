"""Where the threads run that read into a GPU."""

from __future__ import annotations

import os
import threading

from shared import _native
from shared.ids import DeviceId
from shared.memory.cuda import CudaBackend
from shared.memory.numa import near_processors


def test_a_reading_thread_is_near_its_device(gpu: DeviceId) -> None:
    backend = CudaBackend()
    near = near_processors(_native.cuda_numa_node(gpu))
    before = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def work() -> None:
        backend.stay_near(gpu)
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [set(near) if len(near) >= backend.readers else before]
    assert os.sched_getaffinity(0) == before  # of the others
