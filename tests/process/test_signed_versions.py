"""A model that is served signed only, with real daemons: what is accepted, and what is refused and why."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from loaderd.ctl.exit_codes import ExitCode
from loaderd.seal.create import seal_directory
from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support import procfs
from tests.support.serving_host import ServingHost, serving_host
from tests.support.signing import KeyPair, make_keys, sign_by_reference
from tests.support.tiny_models import derive, flip_byte, low_rank
from tests.unit.checkpoint_files import write_single

WEIGHTS = "model.layers.1.self_attn.o_proj.weight"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def root(models: Path, keys: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """v1, sealed and signed here; v2, not sealed and signed by the reference tool; v3, sealed by
    loaderctl and then signed by the reference tool."""
    root = tmp_path_factory.mktemp("signed")
    for version in ("v1", "v2", "v3"):
        shutil.copytree(models / f"tiny-{version}", root / f"tiny-{version}")
    for version in ("v1", "v2"):
        (root / f"tiny-{version}" / "README.md").write_text("# tiny")
    seal_directory(root / "tiny-v1", key=keys.signing)
    (root / "tiny-v2" / "seal.json").unlink()
    sign_by_reference(root / "tiny-v2", keys)
    sign_by_reference(root / "tiny-v3", keys)
    return root


@pytest.fixture(scope="module")
def host(root: Path, keys: KeyPair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingHost]:
    unused = make_keys(tmp_path_factory.mktemp("unused"))
    config = f'[models.tiny]\nverify = "signed"\ntrusted_keys = ["{unused.public}", "{keys.public}"]'
    with serving_host(root, config) as host:
        host.start_loaderd()
        host.start_inferd()
        host.push("v1")
        yield host


def serves(host: ServingHost, version: str, expected: Expected) -> None:
    """The version answers, with what its files say."""
    with host.client() as client:
        answer = client.ask(PROMPTS[0], NEW_TOKENS)
    assert answer.version == str(host.active())
    assert answer.version.startswith(f"{version}@")
    assert answer.text == expected[version][PROMPTS[0]]


def verified(host: ServingHost, version: str) -> str:
    return next(v.verified for v in host.status().versions if v.tag.version == version)


def test_signed_versions_serve_however_they_were_signed(host: ServingHost, expected: Expected) -> None:
    assert verified(host, "v1") == "signed"
    for version in ("v2", "v3", "v1"):
        operation = host.push(version)
        assert operation.state == "done"
        assert verified(host, version) == "signed"
        serves(host, version, expected)
    shown = host.ctl("push", "tiny-v2", "--dry-run")
    assert "tensors (signed)" in shown.out, shown
    assert "tensors (signed, sealed)" in host.ctl("push", "tiny-v1", "--dry-run").out
    assert "against what was signed" in host.ctl("verify", "tiny-v1").out


def test_after_a_restart_memory_is_signed_as_long_as_its_key_is_trusted(
    root: Path, keys: KeyPair, stranger: KeyPair
) -> None:
    """The journal says what it was held against, its digest that it still is that."""

    def trust(*trusted: KeyPair) -> str:
        files = ", ".join(f'"{pair.public}"' for pair in trusted)
        return f'[models.tiny]\nverify = "signed"\ntrusted_keys = [{files}]'

    with serving_host(root, trust(keys)) as host:
        host.start_loaderd()
        host.start_inferd()
        for version in ("v1", "v2"):
            assert host.push(version).state == "done"
        for trusted, expected in (((stranger, keys), "signed"), ((stranger,), "digest"), ((keys,), "signed")):
            host.loaderd_config = trust(*trusted)
            host.restart_loaderd()
            host.awaited(host.retained, "both are taken back")
            assert [verified(host, version) for version in ("v1", "v2")] == [expected, expected]
        causes = [entry.cause for entry in host.history()]
        assert causes.count("handed back by inferd a") == 6, "and not read again"
        assert host.rollback().state == "done"
        assert verified(host, "v1") == "signed"


def test_a_push_of_what_serves_brings_its_signature(
    root: Path, keys: KeyPair, stranger: KeyPair, tmp_path: Path
) -> None:
    """As after a change of keys: the folder is signed anew and pushed again, and nothing is read a third
    time after a restart.  The way back is as it was."""
    models = tmp_path / "models"
    for version in ("v1", "v2"):
        shutil.copytree(root / f"tiny-{version}", models / f"tiny-{version}")

    def config(pair: KeyPair) -> str:
        return f'[models.tiny]\nverify = "signed"\ntrusted_keys = ["{pair.public}"]'

    with serving_host(models, config(keys)) as host:
        host.start_loaderd()
        host.start_inferd()
        for version in ("v1", "v2"):
            host.push(version)
        host.loaderd_config = config(stranger)
        for version in ("v1", "v2"):
            seal_directory(models / f"tiny-{version}", key=stranger.signing)
        for expected in ("digest", "signed"):
            host.restart_loaderd()
            host.awaited(host.retained, "both are taken back")
            assert verified(host, "v2") == expected
            assert verified(host, "v1") == "digest"
            if expected == "digest":
                operation = host.push("v2")
                assert any("serves already" in warning for warning in operation.warnings)
                assert verified(host, "v2") == "signed"
        assert host.push("v1").state == "done"
        assert verified(host, "v1") == "signed"
        (models / "tiny-v1" / "model.sig").unlink()
        assert host.refused("tiny-v1")[0] is ExitCode.FAILED
        assert verified(host, "v1") == "signed", "what serves is as it was"


# --- refused -------------------------------------------------------------------------------------


Spoil = Callable[[Path, KeyPair, KeyPair], object]
"""Changes a folder, which a trusted key has signed; gets that key and a stranger's."""


def altered(name: str) -> Spoil:
    def spoil(folder: Path, keys: KeyPair, stranger: KeyPair) -> None:
        (folder / name).write_text((folder / name).read_text() + " ")

    return spoil


def tampered(folder: Path, keys: KeyPair, stranger: KeyPair) -> None:
    path = folder / "model.sig"
    before = path.read_text()
    path.write_text(before.replace('"payload":"ewogICJ', '"payload":"ewogICK'))
    assert path.read_text() != before


def sealed_again(folder: Path, keys: KeyPair, stranger: KeyPair) -> None:
    altered("config.json")(folder, keys, stranger)
    seal_directory(folder)


def damaged(folder: Path, keys: KeyPair, stranger: KeyPair) -> None:
    """Weights that are nowhere resident, signed with their seal, and then one bit."""
    shutil.rmtree(folder)
    derive(folder.parent / "tiny-v1", folder, low_rank(9), is_sealed=False)
    seal_directory(folder, key=keys.signing)
    flip_byte(folder, WEIGHTS)


CASES: dict[str, tuple[str, Spoil, str]] = {
    "no signature": (
        "tiny-v3",
        lambda folder, keys, stranger: (folder / "model.sig").unlink(),
        "model.sig: does not exist: the folder is not signed",
    ),
    "wrong key": (
        "tiny-v3",
        lambda folder, keys, stranger: seal_directory(folder, key=stranger.signing),
        "model.sig: was made with key {stranger}, which is not trusted",
    ),
    "altered signature": ("tiny-v3", tampered, "model.sig: is not a valid signature of"),
    "altered seal": ("tiny-v3", altered("seal.json"), ": the seal was altered after signing"),
    "sealed again": ("tiny-v3", sealed_again, ": the seal was altered after signing"),
    "altered config": ("tiny-v3", altered("config.json"), "config.json: is sha256:"),
    "altered weights": ("tiny-v3", damaged, f"{SHARD}: tensor '{WEIGHTS}': byte "),
    "altered weights, no seal": (
        "tiny-v2",
        lambda folder, keys, stranger: flip_byte(folder, WEIGHTS),
        f"{SHARD}: is sha256:",
    ),
    "altered file beside": ("tiny-v1", altered("README.md"), "README.md: is sha256:"),
    "extra file": (
        "tiny-v3",
        lambda folder, keys, stranger: (folder / "extra.safetensors").write_text("x"),
        "extra.safetensors: is in the folder and not in the signature",
    ),
    "missing file": (
        "tiny-v3",
        lambda folder, keys, stranger: (folder / "tokenizer_config.json").unlink(),
        "tokenizer_config.json: is in the signature and not in the folder",
    ),
    "missing shard": (
        "tiny-v3",
        lambda folder, keys, stranger: (folder / SHARD).unlink(),
        f"{SHARD}: is named by the index and does not exist",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_as_it_was_signed_is_refused(
    host: ServingHost, root: Path, keys: KeyPair, stranger: KeyPair, expected: Expected, case: str
) -> None:
    base, spoil, reason = CASES[case]
    active = host.active()
    assert active is not None
    folder = root / "tiny-v90"
    shutil.copytree(root / base, folder)
    try:
        spoil(folder, keys, stranger)
        result = host.ctl("push", "tiny-v90")
    finally:
        shutil.rmtree(folder)
    assert result.code == ExitCode.FAILED, result
    assert reason.format(stranger=stranger.trusted.hint[:12]) in result.err, result
    assert host.active() == active
    serves(host, active.ref.version, expected)


# --- what a fine-tune costs ----------------------------------------------------------------------


def test_a_sealed_fine_tune_reads_and_allocates_what_it_changed(
    host: ServingHost, root: Path, keys: KeyPair
) -> None:
    """Two of twenty tensors differ: a tenth is read and a tenth allocated, up to whole slabs."""
    mib = 1 << 20
    tensors = {f"w{i}": ("U8", [2, mib], Random(i).randbytes(2 * mib)) for i in range(20)}
    base = write_single(root / "big-v1", tensors)
    changed = {f"w{i}": ("U8", [2, mib], Random(100 + i).randbytes(2 * mib)) for i in (3, 11)}
    tuned = write_single(root / "big-v2", {**tensors, **changed})
    seal_directory(base)
    seal_directory(tuned)
    first = host.done(host.start_push_of("big-v1"))
    assert first.bytes_read == 40 * mib

    used = host.status().memory[0].used_bytes
    read = procfs.bytes_read(host.loaderd.pid)
    second = host.done(host.start_push_of("big-v2"))
    read = procfs.bytes_read(host.loaderd.pid) - read
    used = host.status().memory[0].used_bytes - used
    assert second.bytes_read == 4 * mib
    assert 4 * mib <= read < 5 * mib, "beside the tensors: headers, seal, messages"
    assert 4 * mib <= used <= 4 * mib + 2 * mib, "a slab is a multiple of 2 MiB"
