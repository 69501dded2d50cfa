"""Signed folders: made here and read by the reference tool, made by it and read here, and refused."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from loaderd.checkpoint import replacement
from loaderd.checkpoint.checkpoint import Checkpoint, open_directory
from loaderd.checkpoint.folder import Folder
from loaderd.checkpoint.replacement import is_temporary
from loaderd.config import ModelConfig
from loaderd.planning import open_checked
from loaderd.seal import create
from loaderd.seal.check import verify_directory
from loaderd.seal.create import seal_directory
from loaderd.seal.document import Seal, read_seal
from loaderd.signature.bundle import SIGNATURE_LIMIT_BYTES
from loaderd.signature.check import SignedFolder, check_signature, prove
from loaderd.signature.statement import Statement
from shared.errors import CheckpointError, DigestMismatch, DriverError, SignatureRefused
from shared.ids import VersionRef
from tests.support.signing import (
    KeyPair,
    make_keys,
    payload_of,
    resign,
    sign_by_reference,
    verify_by_reference,
)
from tests.unit.checkpoint_files import write_sharded

SHARDS = {
    "a.safetensors": {"big": ("U8", [9], b"123456789"), "s": ("F32", [], b"abcd")},
    "b.safetensors": {"w": ("U8", [3], b"www"), "stray": ("U8", [2], b"??")},
}
PLACED = {"big": "a.safetensors", "s": "a.safetensors", "w": "b.safetensors"}


BESIDE = ("README.md", "docs/é.txt", "docs/a.b/c", "docs/a/c", ".cache/x")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> KeyPair:
    return make_keys(tmp_path_factory.mktemp("other"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Not signed: a checkpoint, files beside it, and what a signature leaves out."""
    folder = write_sharded(tmp_path / "m-v1", SHARDS, weight_map=PLACED)
    for path in (*BESIDE, ".git/HEAD", ".gitignore"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    return folder


@pytest.fixture
def signed(folder: Path, keys: KeyPair) -> Path:
    seal_directory(folder, key=keys.signing)
    return folder


def opened(folder: Path, keys: KeyPair) -> SignedFolder:
    """What is checked before anything is loaded."""
    with open_directory(folder) as checkpoint:
        return check_signature(checkpoint, (keys.trusted,))


def proven(folder: Path, keys: KeyPair) -> Seal:
    """The seal that a version of the folder is loaded by."""
    with open_directory(folder) as checkpoint:
        signed = check_signature(checkpoint, (keys.trusted,))
        seal = read_seal(checkpoint.seal_bytes) if checkpoint.seal_bytes is not None else None
        return prove(checkpoint, signed, seal, jobs=2)


# --- with the reference tool ---------------------------------------------------------------------


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
def test_the_reference_accepts_what_seal_signs(tmp_path: Path, folder: Path, curve: ec.EllipticCurve) -> None:
    keys = make_keys(tmp_path / "keys", curve=curve)
    seal_directory(folder, key=keys.signing, jobs=2)
    done = verify_by_reference(folder, keys)
    assert (done.returncode, done.stdout) == (0, "Verification succeeded\n"), done
    (folder / "docs/a/c").write_text("altered")
    assert "Hash mismatch" in verify_by_reference(folder, keys).stderr


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
@pytest.mark.parametrize("is_sealed", [True, False])
def test_what_the_reference_signs_is_accepted(
    tmp_path: Path, folder: Path, curve: ec.EllipticCurve, is_sealed: bool
) -> None:
    keys = make_keys(tmp_path / "keys", curve=curve)
    expected = seal_directory(folder)
    if not is_sealed:
        (folder / "seal.json").unlink()
    sign_by_reference(folder, keys)
    assert opened(folder, keys).key.path == keys.public
    assert proven(folder, keys) == expected
    verified = verify_directory(folder, trusted=(keys.trusted,), jobs=2)
    assert verified.seal == expected
    assert verified.key is not None
    assert verified.key.path == keys.public


def test_both_say_the_same_of_one_folder(folder: Path, keys: KeyPair) -> None:
    seal_directory(folder, key=keys.signing)
    ours = payload_of(folder)
    sign_by_reference(folder, keys)
    theirs = payload_of(folder)
    for statement in (ours, theirs):
        statement["predicate"]["serialization"]["ignore_paths"].sort()
    assert ours == theirs


def test_what_the_signer_left_out_may_be_there(folder: Path, keys: KeyPair) -> None:
    sign_by_reference(folder, keys, "--ignore-paths", folder / "README.md", "--ignore-paths", folder / "docs")
    (folder / "README.md").write_text("altered")
    (folder / "docs" / "more").write_text("added")
    proven(folder, keys)


def test_a_signer_cannot_leave_out_what_is_loaded(folder: Path, keys: KeyPair) -> None:
    sign_by_reference(folder, keys, "--ignore-paths", folder / "config.json")
    with pytest.raises(SignatureRefused, match=r"^model\.sig: leaves out 'config\.json', which would be"):
        opened(folder, keys)


def test_files_may_be_symlinks(folder: Path, keys: KeyPair) -> None:
    """A hub's snapshot: its files point to blobs beside it."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for name in ("a.safetensors", "README.md"):
        shutil.move(folder / name, blobs / name)
        (folder / name).symlink_to(blobs / name)
    seal_directory(folder, key=keys.signing)
    assert payload_of(folder)["predicate"]["serialization"]["allow_symlinks"] is True
    proven(folder, keys)
    assert verify_by_reference(folder, keys, "--allow_symlinks").returncode == 0


# --- refused, each with a message of its own -----------------------------------------------------


def refusal(folder: Path, keys: KeyPair) -> str:
    with pytest.raises(SignatureRefused) as caught:
        opened(folder, keys)
    return caught.value.message


def test_no_signature(folder: Path, keys: KeyPair) -> None:
    assert refusal(folder, keys) == "model.sig: does not exist: the folder is not signed"


def test_a_key_that_is_not_trusted(signed: Path, keys: KeyPair, other_keys: KeyPair) -> None:
    hint, other = keys.trusted.hint[:12], other_keys.trusted.hint[:12]
    assert refusal(signed, other_keys) == (
        f"model.sig: was made with key {hint}, which is not trusted ({other_keys.public} is {other})"
    )


def test_any_of_several_keys_will_do(signed: Path, keys: KeyPair, other_keys: KeyPair) -> None:
    with open_directory(signed) as checkpoint:
        trusted = (other_keys.trusted, keys.trusted)
        assert check_signature(checkpoint, trusted).key.path == keys.public


def test_a_bundle_that_names_no_key_is_tried_with_each(
    signed: Path, keys: KeyPair, other_keys: KeyPair
) -> None:
    text = (signed / "model.sig").read_text()
    (signed / "model.sig").write_text(text.replace(f'"hint":"{keys.trusted.hint}"', ""))
    with open_directory(signed) as checkpoint:
        assert check_signature(checkpoint, (other_keys.trusted, keys.trusted)).key.path == keys.public
    assert "is not a valid signature of" in refusal(signed, other_keys)


def test_a_bundle_that_claims_another_key(signed: Path, keys: KeyPair, other_keys: KeyPair) -> None:
    text = (signed / "model.sig").read_text()
    (signed / "model.sig").write_text(text.replace(keys.trusted.hint, other_keys.trusted.hint))
    assert refusal(signed, other_keys) == (
        f"model.sig: is not a valid signature of {other_keys.public}: what was signed has been altered"
    )


@pytest.mark.parametrize("at", [0, 100, -5])
def test_an_altered_statement(signed: Path, keys: KeyPair, at: int) -> None:
    text = (signed / "model.sig").read_text()
    start = text.index('"payload":"') + len('"payload":"')
    end = text.index('"', start)
    payload = list(text[start:end])
    payload[at] = "A" if payload[at] != "A" else "B"
    (signed / "model.sig").write_text(text[:start] + "".join(payload) + text[end:])
    assert "is not a valid signature of" in refusal(signed, keys)


def test_a_statement_is_not_parsed_before_its_signature_holds(
    signed: Path, keys: KeyPair, other_keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(payload: bytes) -> Statement:
        raise AssertionError("parsed")

    monkeypatch.setattr("loaderd.signature.check.read_statement", never)
    text = (signed / "model.sig").read_text()
    (signed / "model.sig").write_text(text.replace(keys.trusted.hint, other_keys.trusted.hint))
    assert "is not a valid signature" in refusal(signed, other_keys)


def test_a_malformed_signature(signed: Path, keys: KeyPair) -> None:
    (signed / "model.sig").write_text("{}")
    assert refusal(signed, keys) == "model.sig: the bundle lacks 'mediaType'"
    (signed / "model.sig").unlink()
    with (signed / "model.sig").open("wb") as file:
        file.truncate(SIGNATURE_LIMIT_BYTES + 1)
    with pytest.raises(CheckpointError, match=r"^model\.sig: has 16777217 bytes, 16777216 are allowed"):
        opened(signed, keys)


@pytest.mark.parametrize("name", ["extra.txt", "x.safetensors", "vocab.json", "docs/extra", "new/deep/er"])
def test_an_extra_file(signed: Path, keys: KeyPair, name: str) -> None:
    (signed / name).parent.mkdir(parents=True, exist_ok=True)
    (signed / name).write_text("{}")
    assert refusal(signed, keys) == f"{name}: is in the folder and not in the signature"


@pytest.mark.parametrize("name", ["README.md", "docs/é.txt", ".cache/x", "seal.json"])
def test_a_missing_file(signed: Path, keys: KeyPair, name: str) -> None:
    (signed / name).unlink()
    assert refusal(signed, keys) == f"{name}: is in the signature and not in the folder"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_an_altered_document(signed: Path, keys: KeyPair, name: str) -> None:
    before = (signed / name).read_text()
    (signed / name).write_text(before + " ")
    message = refusal(signed, keys)
    assert message.startswith(f"{name}: is sha256:")
    assert message.endswith(": altered after signing")


def test_an_altered_seal_is_told_before_it_is_parsed(signed: Path, keys: KeyPair) -> None:
    (signed / "seal.json").write_text("{")
    message = refusal(signed, keys)
    assert message.startswith("seal.json: is sha256:")
    assert message.endswith(": the seal was altered after signing")


def test_a_folder_that_was_sealed_after_it_was_signed(folder: Path, keys: KeyPair) -> None:
    sign_by_reference(folder, keys)
    seal_directory(folder)
    assert refusal(folder, keys) == (
        "seal.json: is not covered by the signature: the folder was sealed after it was signed"
    )


def test_a_seal_and_a_signature_of_different_contents(signed: Path, keys: KeyPair) -> None:
    """Signed by one who did not look: the seal is signed, and says of a file what the signature does not."""

    def other_digest(statement: dict[str, dict[str, list[dict[str, str]]]]) -> None:
        (entry,) = (e for e in statement["predicate"]["resources"] if e["name"] == "a.safetensors")
        entry["digest"] = "0" * 64

    resign(signed, keys, other_digest)
    config = ModelConfig(verify="signed", trusted_keys=(keys.trusted,))
    with pytest.raises(SignatureRefused) as caught:
        open_checked((signed.parent,), signed.name, VersionRef("m", "v1"), config)
    assert caught.value.message.startswith("m-v1/a.safetensors: the seal says sha256:")
    assert f"the signature sha256:{'0' * 64}: they are of different contents; if " in caught.value.message


@pytest.mark.parametrize("name", ["README.md", "docs/a/c"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_an_altered_file_beside_the_version(folder: Path, keys: KeyPair, name: str, is_sealed: bool) -> None:
    if is_sealed:
        seal_directory(folder, key=keys.signing)
    else:
        sign_by_reference(folder, keys)
    (folder / name).write_text("altered")
    opened(folder, keys)  # nothing but hashing shows it
    for check in (proven, lambda folder, keys: verify_directory(folder, trusted=(keys.trusted,))):
        with pytest.raises(SignatureRefused, match=rf"^{name}: is sha256:.*: altered after signing"):
            check(folder, keys)


@pytest.mark.parametrize("where", ["www", "stray", "??"])  # of the version, the header, outside the index
def test_an_altered_weight_file_without_a_seal(folder: Path, keys: KeyPair, where: str) -> None:
    sign_by_reference(folder, keys)
    raw = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(raw.replace(where.encode(), b"." * len(where)))
    with pytest.raises(SignatureRefused, match=r"^b\.safetensors: is sha256:.*: altered after signing"):
        proven(folder, keys)


@pytest.mark.parametrize("where", ["www", "stray"])
def test_an_altered_weight_file_with_a_seal(signed: Path, keys: KeyPair, where: str) -> None:
    raw = (signed / "b.safetensors").read_bytes()
    (signed / "b.safetensors").write_bytes(raw.replace(where.encode(), where.upper().encode()))
    with pytest.raises(DigestMismatch, match=r"^b\.safetensors: .*the seal says"):
        verify_directory(signed, trusted=(keys.trusted,))


def test_the_seal_that_is_made_is_of_the_bytes_that_were_held_against_the_signature(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read: no other can come between the flat digest and the leaves."""
    sign_by_reference(folder, keys)
    reads: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(preadv(fd, buffers, offset))
        return reads[-1]

    monkeypatch.setattr(os, "preadv", counted)
    proven(folder, keys)
    weights = sum((folder / name).stat().st_size for name in SHARDS)
    beside = sum(
        (folder / name).stat().st_size for name in ("README.md", "docs/é.txt", "docs/a.b/c", "docs/a/c")
    )
    assert sum(reads) == weights + beside + (folder / ".cache/x").stat().st_size


def test_a_sealed_folder_without_other_files_is_not_read_twice(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("README.md", "docs", ".cache"):
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    seal_directory(folder, key=keys.signing)
    monkeypatch.setattr(os, "preadv", None)
    proven(folder, keys)


# --- changes meanwhile ---------------------------------------------------------------------------


def swapped_offsets(raw: bytes) -> bytes:
    """A file of the same tensors that says of each that it is where the other is."""
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    first, second = header
    header[first], header[second] = header[second], header[first]
    return raw[:8] + json.dumps(header).encode() + raw[8 + length :]


def test_a_file_that_is_rewritten_while_it_is_hashed(folder: Path, keys: KeyPair) -> None:
    sign_by_reference(folder, keys)

    def write(done: int, total: int) -> None:
        (folder / "README.md").write_text("README.md")

    with open_directory(folder) as checkpoint:
        signed = check_signature(checkpoint, (keys.trusted,))
        with pytest.raises(CheckpointError, match=r"^README\.md: changed while it was read"):
            prove(checkpoint, signed, None, progress=write)


def test_a_header_that_is_swapped_back_before_it_is_hashed(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tensors whose places were exchanged while the header was parsed, within one tick of the clock."""
    good = (folder / "a.safetensors").read_bytes()
    bad = swapped_offsets(good)
    sign_by_reference(folder, keys)
    with (folder / "a.safetensors").open("r+b") as file:
        file.write(bad)
    with open_directory(folder) as checkpoint:
        signed = check_signature(checkpoint, (keys.trusted,))
        with (folder / "a.safetensors").open("r+b") as file:
            file.write(good)
        monkeypatch.setattr(Checkpoint, "verify_unchanged", lambda checkpoint: None)
        with pytest.raises(CheckpointError, match=r"^a\.safetensors: byte 0: its header changed"):
            prove(checkpoint, signed, None)


def test_a_signature_that_is_replaced_while_a_folder_is_read(signed: Path, keys: KeyPair) -> None:
    with open_directory(signed) as checkpoint:
        found = check_signature(checkpoint, (keys.trusted,))
        assert checkpoint.seal_bytes is not None
        (signed / "model.sig").write_text("{}")
        with pytest.raises(CheckpointError, match=r"^model\.sig: was replaced while the folder was read"):
            prove(checkpoint, found, read_seal(checkpoint.seal_bytes))


def test_a_file_that_appears_while_a_folder_is_signed(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = Checkpoint.verify_unchanged

    def appear(checkpoint: Checkpoint) -> None:
        verify(checkpoint)
        (folder / "late.txt").write_text("x")

    monkeypatch.setattr(Checkpoint, "verify_unchanged", appear)
    with pytest.raises(CheckpointError, match=r"^late\.txt: appeared or went away while it was signed"):
        seal_directory(folder, key=keys.signing)
    assert not (folder / "model.sig").exists()
    assert not (folder / "seal.json").exists()


@pytest.mark.parametrize("name", ["seal.json", ".seal.json.0123456789abcdef"])
def test_another_seal_while_a_folder_is_signed_is_told(folder: Path, keys: KeyPair, name: str) -> None:
    def appear(done: int, total: int) -> None:
        if done == total:
            (folder / name).write_text("{}")

    with pytest.raises(CheckpointError, match=r"another seal of it ran; try again"):
        seal_directory(folder, key=keys.signing, progress=appear)
    assert not (folder / "model.sig").exists()


def test_the_signature_is_written_after_the_seal(
    folder: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    replace = create.replace_file

    def spy(fd: int, name: str, data: bytes) -> None:
        written.append(name)
        replace(fd, name, data)

    monkeypatch.setattr(create, "replace_file", spy)
    seal_directory(folder, key=keys.signing)
    assert written == ["seal.json", "model.sig"]


# --- what is no file -----------------------------------------------------------------------------


def pipe(path: Path) -> None:
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def to_a_folder(path: Path) -> None:
    path.symlink_to("docs")


def not_unicode(path: Path) -> None:
    (path.parent / os.fsdecode(b"odd\xff")).write_text("x")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (pipe, "odd: is not a regular file"),
        (dangling, "odd: cannot be opened"),
        (to_a_folder, "odd: is a folder, expected a file"),
        (not_unicode, r"odd\\udcff: has a name that is not UTF-8"),
    ],
)
@pytest.mark.parametrize("does_sign", [True, False])
def test_what_no_signature_can_cover(
    signed: Path, keys: KeyPair, make: Callable[[Path], None], reason: str, does_sign: bool
) -> None:
    make(signed / "odd")
    with pytest.raises(CheckpointError, match=reason):
        seal_directory(signed, key=keys.signing) if does_sign else opened(signed, keys)


def test_a_symlink_that_leads_out_of_the_root(signed: Path, keys: KeyPair) -> None:
    (signed / "docs/link").symlink_to("../../../outside")
    with (
        Checkpoint(Folder.open(signed.parent, signed.name)) as checkpoint,
        pytest.raises(CheckpointError, match=r"^docs/link: leads out of the model root"),
    ):
        check_signature(checkpoint, (keys.trusted,))


def test_a_tree_has_bounds(signed: Path, keys: KeyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loaderd.checkpoint.folder._MAX_DEPTH", 1)
    with pytest.raises(CheckpointError, match=r"^docs/a: lies more than 1 folders deep"):
        opened(signed, keys)
    monkeypatch.setattr("loaderd.checkpoint.folder.TREE_LIMIT", 5)
    with pytest.raises(CheckpointError, match=r"^m-v1: holds more than 5 files"):
        opened(signed, keys)


def test_a_folder_that_cannot_be_signed_keeps_its_seal(folder: Path, keys: KeyPair) -> None:
    seal_directory(folder)
    before = (folder / "seal.json").read_bytes()
    (folder / "config.json").write_text("{ }")
    (folder / "model.sig").mkdir()
    with pytest.raises(CheckpointError):
        seal_directory(folder, key=keys.signing)
    assert (folder / "seal.json").read_bytes() == before


# --- what a killed seal leaves -------------------------------------------------------------------

LEFT = (".seal.json.0123456789abcdef", ".model.sig.0123456789abcdef")


@pytest.mark.parametrize("left", LEFT)
def test_what_a_killed_seal_left_is_not_signed(folder: Path, keys: KeyPair, left: str) -> None:
    (folder / left).write_text("half of")
    (folder / ".seal.json.backup").write_text("someone's own")
    seal_directory(folder, key=keys.signing)
    assert not (folder / left).exists()
    names = {resource["name"] for resource in payload_of(folder)["predicate"]["resources"]}
    assert ".seal.json.backup" in names
    assert left not in names
    proven(folder, keys)
    assert verify_by_reference(folder, keys).returncode == 0


def test_a_seal_that_is_killed_leaves_a_file_that_the_next_one_removes(folder: Path, keys: KeyPair) -> None:
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from loaderd.seal.create import seal_directory\n"
        "os.rename = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)\n"
        "seal_directory(Path(sys.argv[1]))\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(folder)], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [path for path in folder.iterdir() if is_temporary(path.name)]
    seal_directory(folder)
    assert not [path for path in folder.iterdir() if is_temporary(path.name)]


@pytest.mark.parametrize("left", LEFT)
def test_what_a_living_seal_writes_is_let_alone(folder: Path, keys: KeyPair, left: str) -> None:
    with (folder / left).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"is being written: another seal of this folder runs;"):
            seal_directory(folder, key=keys.signing)
    assert (folder / left).exists()
    assert not (folder / "model.sig").exists()


def test_a_file_is_locked_while_it_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step that takes long, and until it has its name."""
    seen: list[str] = []

    def spy(call: str) -> None:
        real = getattr(os, call)

        def checked(*args: object, **kwargs: object) -> object:
            for path in filter(lambda path: is_temporary(path.name), folder.iterdir()):
                with path.open("r+") as file, pytest.raises(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                seen.append(call)
            return real(*args, **kwargs)

        monkeypatch.setattr(replacement.os, call, checked)

    for call in ("write", "fsync", "rename"):
        spy(call)
    seal_directory(folder)
    assert seen == ["write", "fsync", "rename"]


def test_what_cannot_be_removed_is_told(folder: Path, keys: KeyPair) -> None:
    (folder / LEFT[0]).mkdir()
    with pytest.raises(DriverError, match=r"which a seal that was killed left: Is a directory$"):
        seal_directory(folder, key=keys.signing)


def test_what_a_later_seal_left_in_a_signed_folder_is_named(signed: Path, keys: KeyPair) -> None:
    (signed / LEFT[0]).write_text("half of")
    assert refusal(signed, keys) == (
        f"{LEFT[0]}: is in the folder and not in the signature: a seal writes it, or was killed; "
        "when none runs, seal and sign again, or remove it"
    )
