"""What NVML says as plain values, and that nothing it refuses becomes an error."""

from __future__ import annotations

import sys

import pytest

from loaderd.gpu_reading import GpuEvent, GpuHolder, GpuReading, describe_event, describe_holders
from loaderd.nvml import Nvml, open_nvml
from shared.errors import DriverError, OutOfMemory
from shared.ids import DeviceId
from tests.unit.fake_nvml import GPU, Device, FakeMismatchError, FakeNvml, FakeNvmlError, Process

DEVICE = DeviceId(GPU)
MIB = 1 << 20


def test_a_reading_has_memory_errors_and_holders() -> None:
    device = Device(errors=3, processes=[Process(7, 5 * MIB, b"vllm"), Process(8, None, None)])
    reading = Nvml(FakeNvml(device)).read(DEVICE)
    holders = (GpuHolder(7, "vllm", 5 * MIB), GpuHolder(8, "?", None))
    assert reading == GpuReading(80 << 30, 60 << 30, 3, holders)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("nvmlDeviceGetMemoryInfo", GpuReading(None, None, 0)),
        ("nvmlDeviceGetTotalEccErrors", GpuReading(80 << 30, 60 << 30, None)),
        ("nvmlDeviceGetComputeRunningProcesses", GpuReading(80 << 30, 60 << 30, 0)),
        ("nvmlDeviceGetHandleByUUID", GpuReading()),
    ],
)
@pytest.mark.parametrize("error", [FakeNvmlError(999, "Unknown Error"), FakeMismatchError("other version")])
def test_what_nvml_refuses_is_not_known(call: str, expected: GpuReading, error: Exception) -> None:
    library = FakeNvml(Device())
    library.failing[call] = error
    assert Nvml(library).read(DEVICE) == expected


def test_a_process_name_may_be_any_bytes() -> None:
    library = FakeNvml(Device(processes=[Process(7, MIB)]))
    library.failing["nvmlSystemGetProcessName"] = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid")
    assert Nvml(library).read(DEVICE).holders == (GpuHolder(7, "?", MIB),)


def test_a_mig_instance_is_found_and_its_gpu_is_watched() -> None:
    library = FakeNvml(Device("MIG-5", free=1), Device("GPU-9"))
    nvml = Nvml(library)
    assert nvml.read(DeviceId("GPU-5")).free_bytes == 1
    events = nvml.watch((DeviceId("GPU-5"),))
    assert library.sets[0].kinds == {"GPU-9": 2 | 8}
    events.close()


def test_an_event_says_which_gpu_and_what() -> None:
    device = Device()
    library = FakeNvml(device)
    events = Nvml(library).watch((DEVICE,))
    library.happen(device, library.nvmlEventTypeXidCriticalError, 79)
    library.happen(device, library.nvmlEventTypeDoubleBitEccError)
    assert events.wait(1000) == GpuEvent(GPU, 79)
    assert events.wait(1000) == GpuEvent(GPU, None)
    assert events.wait(0) is None
    events.close()
    events.close()
    assert not library.sets


def test_only_kinds_that_the_device_has_are_registered() -> None:
    library = FakeNvml(Device(event_kinds=8))
    events = Nvml(library).watch((DEVICE,))
    assert library.sets[0].kinds == {GPU: 8}
    events.close()


@pytest.mark.parametrize("call", ["nvmlEventSetCreate", "nvmlDeviceRegisterEvents"])
def test_a_registration_that_fails_leaves_nothing(call: str) -> None:
    library = FakeNvml(Device())
    nvml = Nvml(library)
    library.failing[call] = FakeNvmlError(3, "Not Supported")
    with pytest.raises(DriverError, match="registration for GPU events failed with 3"):
        nvml.watch((DEVICE,))
    assert not library.sets
    nvml.close()


def test_devices_without_events_are_no_registration() -> None:
    library = FakeNvml(Device(event_kinds=0))
    nvml = Nvml(library)
    with pytest.raises(DriverError, match="have none"):
        nvml.watch((DEVICE, DeviceId("GPU-unknown")))
    assert not library.sets


def test_without_the_package_there_is_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_nvml() is None


def test_without_the_library_there_is_no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml()
    library.failing["nvmlInit"] = FakeNvmlError(12, "NVML Shared Library Not Found")
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert open_nvml() is None
    del library.failing["nvmlInit"]
    assert open_nvml() is not None


# --- how it is told ------------------------------------------------------------------------------


def test_holders_are_named_largest_first_and_the_rest_is_counted() -> None:
    holders = [GpuHolder(pid, f"p{pid}", pid * MIB) for pid in range(1, 8)] + [GpuHolder(9, "x", None)]
    assert describe_holders(holders, own_pid=6) == (
        "GPU memory is held by pid 7 (p7) with 7 MiB, pid 6 (this loaderd) with 6 MiB, "
        "pid 5 (p5) with 5 MiB, pid 4 (p4) with 4 MiB, pid 3 (p3) with 3 MiB, 3 more with 3 MiB"
    )
    assert describe_holders([GpuHolder(9, "x", None)], 1).endswith("pid 9 (x) with an unknown amount")
    assert describe_holders([], 1) == ""


def test_an_event_is_told_with_what_the_number_means() -> None:
    assert describe_event(GpuEvent("GPU-1", 79)) == "GPU-1 reported Xid 79: the GPU has fallen off the bus"
    assert describe_event(GpuEvent("GPU-1", 1)) == "GPU-1 reported Xid 1"
    assert describe_event(GpuEvent("GPU-1", None)) == "GPU-1 had an uncorrectable ECC error"


def test_an_allocation_that_does_not_fit_names_the_holders() -> None:
    error = OutOfMemory(what="a slab", needed_bytes=2, free_bytes=1)
    assert "holders" not in error.facts
    named = error.naming("GPU memory is held by pid 7")
    assert named.message == "a slab needs 2 bytes, 1 are free; GPU memory is held by pid 7"
    assert named.facts["holders"] == "GPU memory is held by pid 7"
    assert error.naming("").message == error.message
