"""Versions that cannot work: each is refused with its cause, and nothing that serves notices."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgpack
import pytest

from loaderd.seal.create import seal_directory
from shared.codec import PROTOCOL_VERSION
from shared.control import Push, PushReply, StatusReport, Versions, VersionsReport
from tests.process.conftest import NEW_TOKENS, PROMPTS, Expected
from tests.support import procfs
from tests.support.serving_host import ServingHost, serving_host
from tests.support.tiny_models import (
    change_config,
    derive,
    everything_scaled,
    flip_byte,
    low_rank,
    make_model,
    not_a_number,
)
from tests.unit.checkpoint_files import pack, ranges, safetensors, write_sharded, write_single

REQUEST_FIELDS = {"protocol": PROTOCOL_VERSION, "request_id": "r", "deadline_ns": (1 << 63) - 1}
VICTIM = "model.layers.2.mlp.down_proj.weight"
SINGLE = "model.safetensors"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def root(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model root of this module's own."""
    root = tmp_path_factory.mktemp("broken")
    for version in ("v1", "v2"):
        shutil.copytree(models / f"tiny-{version}", root / f"tiny-{version}")
    return root


@pytest.fixture(scope="module")
def host(root: Path) -> Iterator[ServingHost]:
    with serving_host(root, '[models.sealedonly]\nverify = "sealed"') as host:
        host.start_loaderd()
        host.start_inferd()
        host.push("v1")
        host.push("v2")
        host.ctl("status")  # whatever loaderd opens at the first request of a new client
        yield host


def use(state: str) -> str:
    """What a slot is good for: a way back that had to be prepared again is one like any other."""
    return "way back" if state in ("prepared", "retained") else state


@dataclass(frozen=True, slots=True)
class Footprint:
    """All that a push which comes to nothing must leave as it was."""

    models: tuple[str, ...]
    active: object
    retained: object
    epoch: int
    versions: tuple[tuple[str, str, int], ...]
    slots: tuple[tuple[str, str], ...]
    used_bytes: int
    loaderd_fds: dict[str, int]
    inferd_memfds: int

    @classmethod
    def of(cls, host: ServingHost) -> Footprint:
        status: StatusReport = host.status()
        model = host.model(status)
        return cls(
            models=tuple(m.model for m in status.models),
            active=model.active,
            retained=model.retained,
            epoch=model.epoch,
            versions=tuple(sorted((v.tag.digest, v.state, v.nbytes) for v in status.versions)),
            slots=tuple(
                sorted((use(s.state), s.tag.digest if s.tag else "") for s in status.inferds[0].slots)
            ),
            used_bytes=status.memory[0].used_bytes,
            loaderd_fds=dict(procfs.fd_kinds(host.loaderd.pid)),
            inferd_memfds=procfs.memfds(host.inferds["a"].pid),
        )


@pytest.fixture
def unchanged(host: ServingHost, expected: Expected) -> Iterator[None]:
    """The test leaves status, memory and fds as they were, and v2 serving."""
    before = Footprint.of(host)
    yield
    with contextlib.suppress(AssertionError):
        host.awaited(lambda: Footprint.of(host) == before, "everything to be as it was", 10)
    assert Footprint.of(host) == before
    with host.client() as client:
        answer = client.ask(PROMPTS[0], NEW_TOKENS)
    assert answer.version == str(host.active())
    assert answer.text == expected[answer.version.split("@")[0].removeprefix("tiny-")][PROMPTS[0]]


def nan(root: Path) -> None:
    derive(root / "tiny-v2", root / "tiny-v90", not_a_number(VICTIM))


def flipped(root: Path) -> None:
    derive(root / "tiny-v2", root / "tiny-v90", low_rank(9))
    flip_byte(root / "tiny-v90", "model.layers.1.self_attn.o_proj.weight")


def no_tokenizer(root: Path) -> None:
    derive(root / "tiny-v2", root / "tiny-v90", everything_scaled(1.5), is_sealed=False)
    (root / "tiny-v90" / "tokenizer.json").write_text('{"not": "a tokenizer"}')
    seal_directory(root / "tiny-v90")


def other_shape(root: Path) -> None:
    make_model(root / "tiny-v90", hidden=24, layers=3)


def fewer_layers(root: Path) -> None:
    make_model(root / "tiny-v90", layers=2)


def other_config(root: Path) -> None:
    derive(root / "tiny-v2", root / "tiny-v90", low_rank(9), is_sealed=False)
    change_config(root / "tiny-v90", rms_norm_eps=0.1)


def truncated(root: Path) -> None:
    derive(root / "tiny-v2", root / "tiny-v90", low_rank(9), is_sealed=False)
    path = next((root / "tiny-v90").glob("*-00002-*.safetensors"))
    os.truncate(path, path.stat().st_size - 5)


def changed_after_sealing(root: Path) -> None:
    derive(root / "tiny-v2", root / "tiny-v90", low_rank(9))
    change_config(root / "tiny-v90", rms_norm_eps=0.1)


def missing(root: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (
            nan,
            3,
            ["prepare_failed: inferd a", VICTIM.removesuffix(".weight"), "weight holds nan at element 98"],
        ),
        (flipped, 3, ["digest_mismatch", ".safetensors", "model.layers.1.self_attn.o_proj.weight"]),
        (no_tokenizer, 3, ["inferd a"]),
        (other_shape, 5, ["model.embed_tokens.weight", "[257, 24]", "[257, 48]"]),
        (fewer_layers, 5, ["num_hidden_layers", "model.layers.2."]),
        (other_config, 5, ["rms_norm_eps"]),
        (truncated, 3, ["-00002-", "truncated", "byte "]),
        (changed_after_sealing, 3, ["config.json: has ", "the seal says"]),
        (missing, 2, ["tiny-v90", "unknown_version"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.usefixtures("unchanged")
def test_a_version_that_cannot_work(
    host: ServingHost, root: Path, make: Callable[[Path], None], code: int, words: list[str]
) -> None:
    make(root)
    try:
        found, message = host.refused("tiny-v90")
        assert found == code, message
        for word in words:
            assert word in message
    finally:
        shutil.rmtree(root / "tiny-v90", ignore_errors=True)


@pytest.mark.usefixtures("unchanged")
def test_an_unsealed_folder_where_only_sealed_ones_are_served(host: ServingHost, root: Path) -> None:
    make_model(root / "sealedonly-v1")
    code, message = host.refused("sealedonly-v1")
    assert code == 3
    assert "has no seal.json, and sealedonly is served sealed only" in message


def test_a_rollback_works_after_a_push_that_failed_in_prepare(
    host: ServingHost, root: Path, expected: Expected
) -> None:
    nan(root)
    before = host.active()
    try:
        result = host.ctl("push", "tiny-v90", "--json")
        assert result.code == 3
        assert "prepare_failed" in result.out
    finally:
        shutil.rmtree(root / "tiny-v90")
    host.rollback()
    with host.client() as client:
        answer = client.ask(PROMPTS[1], NEW_TOKENS)
    assert (answer.version, answer.text) == (str(host.active()), expected["v1"][PROMPTS[1]])
    host.rollback()
    assert host.active() == before


# --- malformed checkpoints -----------------------------------------------------------------------

ENTRY = '{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
TENSORS = {"a": ("U8", [4], b"aaaa"), "b": ("F32", [2], b"bbbbbbbb")}


def raw(data: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        write_single(folder, TENSORS)
        (folder / SINGLE).write_bytes(data)

    return make


def lacking_tensor(folder: Path) -> None:
    write_sharded(folder, {FIRST: {"a": TENSORS["a"]}}, weight_map={"a": FIRST, "b": FIRST})


def lacking_shard(folder: Path) -> None:
    write_sharded(folder, {FIRST: {"a": TENSORS["a"]}}, weight_map={"a": FIRST, "b": SECOND})


def escaping_shard(folder: Path) -> None:
    write_sharded(folder, {FIRST: {"a": TENSORS["a"]}}, weight_map={"a": FIRST, "b": "../x.safetensors"})


def half_uploaded(folder: Path) -> None:
    write_single(folder, TENSORS)
    (folder / "model-00002.safetensors.incomplete").write_bytes(b"half")


def uploaded_further(folder: Path) -> None:
    write_single(folder, TENSORS)
    seal_directory(folder)
    (folder / "tokenizer.json").write_text("{}")


def pipe_for_a_file(folder: Path) -> None:
    write_single(folder, TENSORS)
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


def link_out(folder: Path) -> None:
    write_single(folder, TENSORS)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/etc/passwd")


def deep_config(folder: Path) -> None:
    write_single(folder, TENSORS)
    (folder / "config.json").write_text("[" * 100_000)


def no_config(folder: Path) -> None:
    write_single(folder, TENSORS)
    (folder / "config.json").unlink()


def odd_seal(folder: Path) -> None:
    write_single(folder, TENSORS)
    (folder / "seal.json").write_text('{"version": 1e400}')


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(raw(safetensors(TENSORS)[:-9]), [SINGLE, "'a'", "byte ", "truncated"], id="c1_payload"),
        pytest.param(raw(safetensors(TENSORS)[:20]), [SINGLE, "truncated: header claims"], id="c1_header"),
        pytest.param(raw(b""), [SINGLE, "truncated: 0 bytes"], id="c1_empty"),
        pytest.param(raw(pack(f'{{"w":{ENTRY},"w":{ENTRY}}}', b"xx")), ["duplicate key 'w'"], id="c2_key"),
        pytest.param(
            raw(pack(f'{{"w":{ENTRY},"\\u0077":{ENTRY}}}', b"xx")), ["duplicate key 'w'"], id="c2_escaped"
        ),
        pytest.param(
            raw(ranges((0, 4), (3, 8), 8)), [SINGLE, "'two'", "byte ", "overlaps 'one'"], id="c3_overlap"
        ),
        pytest.param(raw(ranges((0, 4), (6, 8), 8)), ["'two'", "hole of 2 bytes"], id="c3_hole"),
        pytest.param(raw(ranges((0, 4), (4, 8), 11)), ["3 trailing bytes"], id="c3_rest"),
        pytest.param(raw(pack("{}", length=(1 << 64) - 1)), ["byte 0", "header claims"], id="c4_length"),
        pytest.param(
            raw(
                pack(
                    f'{{"w":{{"dtype":"U8","shape":[2],"data_offsets":[{(1 << 64) - 1},{(1 << 64) + 1}]}}}}',
                    b"xx",
                )
            ),
            ["'w'"],
            id="c4_wrap",
        ),
        pytest.param(lacking_tensor, [FIRST, "'b'", "the index places"], id="c6_tensor"),
        pytest.param(lacking_shard, [SECOND, "does not exist"], id="c6_shard"),
        pytest.param(
            escaping_shard, ["model.safetensors.index.json", "'b'", "not the plain name"], id="c6_out"
        ),
        pytest.param(
            half_uploaded, ["model-00002.safetensors.incomplete", "unfinished upload"], id="c9_part"
        ),
        pytest.param(uploaded_further, ["tokenizer.json", "not in the seal"], id="c9_seal"),
        pytest.param(pipe_for_a_file, [SINGLE, "not a regular file"], id="pipe"),
        pytest.param(link_out, ["config.json", "leads out of the model root"], id="link_out"),
        pytest.param(deep_config, ["config.json"], id="deep_config"),
        pytest.param(no_config, ["config.json", "missing"], id="no_config"),
        pytest.param(odd_seal, ["seal.json"], id="odd_seal"),
    ],
)
@pytest.mark.usefixtures("unchanged")
def test_a_malformed_checkpoint(
    host: ServingHost, root: Path, make: Callable[[Path], None], words: list[str]
) -> None:
    folder = root / "tiny-v91"
    make(folder)
    try:
        code, message = host.refused("tiny-v91")
        assert code == 3, message
        for word in words:
            assert word in message
    finally:
        shutil.rmtree(folder)


def aligned_oddly(folder: Path) -> None:
    (folder / SINGLE).write_bytes(
        pack('{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' + " " * 3, b"abcd")
    )


def scalars(folder: Path) -> None:
    (folder / SINGLE).write_bytes(
        safetensors({"scalar": ("F32", [], b"abcd"), "empty": ("I64", [3, 0], b"")})
    )


def strangely_named(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff\x1b[31m.safetensors")).write_bytes(b"x")


@pytest.mark.parametrize("make", [aligned_oddly, scalars, strangely_named])
@pytest.mark.usefixtures("unchanged")
def test_a_checkpoint_that_is_only_odd_can_be_planned(
    host: ServingHost, root: Path, make: Callable[[Path], None]
) -> None:
    folder = root / "odd-v1"
    write_single(folder, TENSORS)
    make(folder)
    try:
        reply = host.control.ask(Push(name="odd-v1", dry_run=True), PushReply)
        assert reply.plan.verdict == "hot"
        host.control.ask(Versions(), VersionsReport)
    finally:
        shutil.rmtree(folder)


@pytest.mark.usefixtures("unchanged")
def test_a_file_name_is_shown_as_text(host: ServingHost, root: Path) -> None:
    folder = root / "odd-v1"
    write_single(folder, TENSORS)
    strangely_named(folder)
    try:
        result = host.ctl("push", "odd-v1", "--dry-run")
    finally:
        shutil.rmtree(folder)
    assert result.code == 0, result
    assert "[31m.safetensors: not part of the checkpoint" in result.out
    assert "\x1b" not in result.out


@pytest.mark.parametrize("name", ["../tiny-v1", "/etc", "tiny-v1/..", ".", "x" * 300, ""])
@pytest.mark.usefixtures("unchanged")
def test_a_name_that_is_no_folder_below_a_root(host: ServingHost, name: str) -> None:
    """Sent as it is: a client that checks nothing gets no further."""
    body = {"verb": "push", "name": name}
    reply = host.ask_raw(msgpack.packb(REQUEST_FIELDS | {"body": body}))
    assert reply["error"]["code"] == "protocol"
    assert "body.push.name" in reply["error"]["message"]
