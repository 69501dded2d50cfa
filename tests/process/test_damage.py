"""Real daemons over memory that goes bad: scrubbing names the tensor, readiness fails with it, a push heals.

The daemons run with a preloaded library that promises write seals and does not make them; all else is real,
and the bytes that change are those that the inferd computes with.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.serving_host import ServingHost, serving_host

SOURCE = Path(__file__).parents[1] / "support" / "unsealed_memfd.c"
TENSOR = "model.layers.1.mlp.down_proj.weight"
INTERVAL_S = 1.0


@pytest.fixture(scope="module")
def unsealed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The environment that has a daemon's memory unsealed."""
    library = tmp_path_factory.mktemp("preload") / "unsealed_memfd.so"
    subprocess.run(
        [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"],
        check=True,
        timeout=60,
    )
    return {"LD_PRELOAD": str(library)}


@pytest.fixture
def host(models: Path, unsealed: Mapping[str, str]) -> Iterator[ServingHost]:
    with serving_host(models, f"scrub_interval_s = {INTERVAL_S}") as host:
        host.start_loaderd(unsealed)
        host.start_inferd(environ=unsealed)
        host.push("v1")
        host.await_serving("v1", "a")
        yield host


def damage(host: ServingHost, version: str) -> int:
    """Flip a bit of TENSOR in the memory that loaderd has of a version; the number of places found."""
    wanted = tensor_bytes(host.model_root / f"tiny-{version}")
    places = 0
    for fd in Path(f"/proc/{host.loaderd.pid}/fd").iterdir():
        if not str(fd.readlink()).startswith("/memfd:"):
            continue
        with fd.open("r+b", buffering=0) as memory:
            at = memory.read().find(wanted)
            if at >= 0:
                places += 1
                middle = at + len(wanted) // 2
                os.pwrite(memory.fileno(), bytes([wanted[len(wanted) // 2] ^ 1]), middle)
    return places


def tensor_bytes(folder: Path) -> bytes:
    """TENSOR as the checkpoint has it."""
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "np") as file:
            if TENSOR in file.keys():  # noqa: SIM118 - it is no mapping
                data: bytes = file.get_tensor(TENSOR).tobytes()
                return data
    raise AssertionError(f"{folder} has no {TENSOR}")


def reason(host: ServingHost, path: Path) -> str:
    """Why a daemon is not ready; empty if it is."""
    answer = host.get(path, "/readyz")
    text: str = answer.json().get("reason", "") if answer.status_code == 503 else ""
    return text


def test_a_scrub_names_what_is_damaged_and_a_push_heals(host: ServingHost) -> None:
    loaderd, inferd = host.run_dir.loaderd_health, host.run_dir.inferd_health("a")
    assert reason(host, loaderd) == reason(host, inferd) == ""
    assert damage(host, "v1") == 1
    host.awaited(lambda: reason(host, loaderd), "a scrub to find it", 10 * INTERVAL_S)
    host.awaited(lambda: reason(host, inferd), "the inferd to say so")
    tag = host.active()
    assert reason(host, loaderd) == f"active {tag} is damaged: tensor {TENSOR}"
    assert reason(host, inferd) == f"version: {tag} is damaged: tensor {TENSOR}"
    found = [entry for entry in host.history() if entry.kind == "version.damaged"]
    assert [(e.data["tensor"], e.data["found_by"], e.version) for e in found] == [(TENSOR, "scrub", "v1")]
    assert str(found[0].data["file"]).endswith(".safetensors")
    shown = host.ctl("status")
    assert "DAMAGED" in shown.out
    assert host.ctl("verify", "tiny-v1").code != 0
    with host.client() as client:
        assert client.ask("it serves on", 4).version == str(tag)

    host.push("v1")
    assert reason(host, loaderd) == reason(host, inferd) == ""
    assert host.ctl("verify", "tiny-v1").code == 0
    assert "DAMAGED" not in host.ctl("status").out
    assert damage(host, "v1") == 1, "the damaged copy is gone and a whole one is there"


def test_a_restarted_loaderd_does_not_take_damaged_memory_back(
    host: ServingHost, unsealed: Mapping[str, str]
) -> None:
    inferd = host.run_dir.inferd_health("a")
    before = host.active()
    assert damage(host, "v1") == 1
    host.kill_loaderd()
    host.start_loaderd(unsealed)
    host.await_serving("v1", "a")
    host.awaited(lambda: host.status().models[0].active is not None, "the version to be loaded again")
    host.awaited(lambda: not reason(host, inferd), "the inferd to be healed")
    assert host.active() == before
    assert host.ctl("verify", "tiny-v1").code == 0
