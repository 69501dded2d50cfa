"""`seal` and `verify`, on folders that are really hashed and on a resident version."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from loaderd.ctl import tables
from loaderd.ctl.hash_progress import HashProgress
from loaderd.ctl.terminal import Terminal
from loaderd.remedy import SEAL_IT, SIGN_IT
from loaderd.signature.create import sign_files
from loaderd.signature.keys import SigningKey
from shared.digest import file_digest
from shared.errors import UnknownVersion
from tests.support.signing import KeyPair, make_keys
from tests.unit.checkpoint_files import content, write_sharded
from tests.unit.ctl import reports
from tests.unit.ctl.command_line import OnTerminal, environment, run
from tests.unit.ctl.scripted_daemon import ScriptedDaemon

STALE = "warning: model.sig does not cover the new seal.json; "


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shards = {
        f"model-0000{number}-of-00002.safetensors": {
            f"w{number}": ("F32", (256, 1024), content(number, 1 << 20))
        }
        for number in (1, 2)
    }
    return write_sharded(tmp_path / "tiny-v1", shards)


def spoil(folder: Path) -> None:
    """Flip one bit of the last byte of a weight file; its time stays as it was."""
    path = folder / "model-00002-of-00002.safetensors"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_sealed_folder_verifies_with_the_same_digest(tmp_path: Path, folder: Path) -> None:
    sealed = run(tmp_path, "seal", "tiny-v1", "--jobs", "2")
    verified = run(tmp_path, "verify", "tiny-v1/")
    assert (sealed.code, sealed.stderr) == (verified.code, verified.stderr) == (0, "")
    assert sealed.stdout.splitlines()[-2].startswith("sealed: tiny-v1, 2 tensors, 4 files, 2.0 MiB in ")
    assert verified.stdout.splitlines()[-2].startswith("verified: tiny-v1, 2 tensors, 4 files, 2.0 MiB in ")
    assert sealed.stdout.splitlines()[-1] == verified.stdout.splitlines()[-1]
    assert json.loads((folder / "seal.json").read_text())["digest"] in sealed.stdout


@pytest.mark.parametrize("command", [("seal", "tiny-v1"), ("verify", "./tiny-v1")])
def test_json_ends_with_the_result(tmp_path: Path, folder: Path, command: tuple[str, str]) -> None:
    run(tmp_path, "seal", "tiny-v1")
    ran = run(tmp_path, *command, "--json")
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.json_lines[-2]["event"] == "progress"
    assert ran.json_lines[-2]["bytes_done"] == ran.json_lines[-2]["bytes_total"]
    result = ran.json_lines[-1]
    assert (result["event"], result["exit_code"], result["tensors"], result["files"]) == ("result", 0, 2, 4)
    assert result["digest"] == json.loads((folder / "seal.json").read_text())["digest"]


def test_damage_is_exit_3_and_names_file_tensor_and_byte(tmp_path: Path, folder: Path) -> None:
    run(tmp_path, "seal", "tiny-v1")
    spoil(folder)
    ran = run(tmp_path, "verify", "tiny-v1/", "--json")
    assert ran.code == 3
    assert "model-00002-of-00002.safetensors: tensor 'w2': byte" in ran.stderr
    assert ran.json_lines[-1]["code"] == "digest_mismatch"


def test_a_folder_without_a_seal_is_exit_3_and_one_that_is_not_there_is_exit_2(
    tmp_path: Path, folder: Path
) -> None:
    unsealed = run(tmp_path, "verify", "tiny-v1/")
    assert unsealed.code == 3
    assert unsealed.stderr == f"error: seal.json: does not exist: the folder is not sealed{SEAL_IT}\n"
    assert run(tmp_path, "verify", "./nothing").code == 2
    assert run(tmp_path, "seal", "nothing").code == 2


def test_a_terminal_gets_a_bar(tmp_path: Path, folder: Path) -> None:
    ran = OnTerminal.spawn(tmp_path, "seal", "tiny-v1").finish()
    assert ran.code == 0
    assert "hashed ━" in ran.screen
    assert "2.0 MiB of 2.0 MiB" in ran.screen


def test_a_name_without_a_slash_is_a_resident_version_even_where_a_folder_has_it(
    tmp_path: Path, folder: Path
) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("verify", reports.verification())
        ran = run(tmp_path, "verify", "tiny-v1")
        assert daemon.asked[0].body.model_dump() == {"verb": "verify", "name": "tiny-v1"}
    assert (ran.code, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == [
        "smollm2-v2: 272 tensors on host, 257.0 MiB hashed in 250 ms, 1.0 GiB/s, against its seal",
        f"  digest   {reports.DIGEST_2}",
    ]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_that_is_meant_is_told_how_to_be_named(tmp_path: Path, folder: Path, is_there: bool) -> None:
    """Whether loaderd does not know the version or is not there at all."""
    with ExitStack() as stack:
        if is_there:
            daemon = stack.enter_context(ScriptedDaemon(tmp_path))
            daemon.on("verify", UnknownVersion("no such version is resident"))
        ran = run(tmp_path, "verify", "tiny-v1", "--json")
        other = run(tmp_path, "verify", "tiny-v2")
    assert ran.code == other.code == (2 if is_there else 6)
    assert ran.stderr.endswith("; tiny-v1 is a folder here; to verify that: loaderctl verify ./tiny-v1\n")
    assert ran.json_lines[-1]["code"] == ("unknown_version" if is_there else "unreachable")
    assert "./" not in other.stderr


@pytest.mark.parametrize(
    ("against", "words"),
    [
        ("sealed", "against its seal"),
        ("signed", "against what was signed"),
        ("digest", "against the digests taken when it was loaded"),
    ],
)
def test_a_report_says_what_a_version_was_held_against(against: str, words: str) -> None:
    report = reports.verification().model_copy(update={"against": against})
    assert next(tables.verification(report)).endswith(words)


@pytest.mark.parametrize("is_json", [False, True])
def test_resident_damage_is_exit_3_and_names_every_tensor(tmp_path: Path, is_json: bool) -> None:
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("verify", reports.verification(damaged=("a.weight", "b.weight")))
        ran = run(tmp_path, "verify", "smollm2-v2", *(["--json"] if is_json else []))
    assert ran.code == 3
    assert ran.stderr == "error: 2 of 272 tensors are damaged\n"
    if is_json:
        assert ran.json_lines[0]["exit_code"] == 3
    else:
        assert ran.stdout.splitlines()[-3:] == [
            "  on       host",
            "  damaged  a.weight",
            "  damaged  b.weight",
        ]


def test_ctrl_c_stops_the_hashing_at_its_next_chunk_and_gives_the_signal_back() -> None:
    terminal = Terminal()
    terminal.is_json = True
    before = signal.getsignal(signal.SIGINT)
    with HashProgress(terminal, "hashed", clock=lambda: 0.0) as progress:
        progress(1, 10)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            progress(2, 10)
    assert signal.getsignal(signal.SIGINT) is before


# --- with keys -----------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> KeyPair:
    return make_keys(tmp_path / "keys")


def test_a_folder_is_sealed_and_signed(tmp_path: Path, folder: Path, keys: KeyPair) -> None:
    sealed = run(tmp_path, "seal", "tiny-v1", "--key", str(keys.private))
    assert (sealed.code, sealed.stderr) == (0, "")
    assert sealed.stdout.splitlines()[-3].startswith("sealed and signed: tiny-v1, 2 tensors, 4 files, ")
    assert sealed.stdout.splitlines()[-1] == f"  key      {keys.trusted.hint} ({keys.private})"
    verified = run(tmp_path, "verify", "tiny-v1/", "--key", str(keys.public))
    assert (verified.code, verified.stderr) == (0, "")
    assert verified.stdout.splitlines()[-3].startswith("verified, signed with a trusted key: tiny-v1, ")
    assert verified.stdout.splitlines()[-1] == f"  key      {keys.trusted.hint} ({keys.public})"
    result = run(tmp_path, "seal", "tiny-v1", "--key", str(keys.private), "--json").json_lines[-1]
    assert (result["key"], result["key_file"]) == (keys.trusted.hint, str(keys.private))


def test_the_key_that_a_folder_was_verified_with_is_told(tmp_path: Path, folder: Path, keys: KeyPair) -> None:
    """Of several that are trusted, the one that signed; without any, none."""
    other = make_keys(tmp_path / "keys", "other")
    run(tmp_path, "seal", "tiny-v1", "--key", str(keys.private))
    trusted = ("--key", str(other.public), "--key", str(keys.public))
    result = run(tmp_path, "verify", "tiny-v1/", *trusted, "--json").json_lines[-1]
    assert (result["key"], result["key_file"]) == (keys.trusted.hint, str(keys.public))
    unasked = run(tmp_path, "verify", "tiny-v1/", "--json").json_lines[-1]
    assert {"key", "key_file"}.isdisjoint(unasked)
    assert "  key  " not in run(tmp_path, "verify", "tiny-v1/").stdout


def test_a_folder_without_a_signature_is_exit_3(tmp_path: Path, folder: Path, keys: KeyPair) -> None:
    run(tmp_path, "seal", "tiny-v1")
    ran = run(tmp_path, "verify", "tiny-v1/", "--key", str(keys.public))
    assert ran.code == 3
    assert ran.stderr == f"error: model.sig: does not exist: the folder is not signed{SIGN_IT}\n"


def test_a_signature_by_another_key(tmp_path: Path, folder: Path, keys: KeyPair) -> None:
    other = make_keys(tmp_path / "keys", "other")
    run(tmp_path, "seal", "tiny-v1", "--key", str(keys.private))
    refused = run(tmp_path, "verify", "tiny-v1/", "--key", str(other.public), "--json")
    assert refused.code == 3
    assert "error: model.sig: was made with key" in refused.stderr
    assert refused.json_lines[-1]["code"] == "signature"
    both = run(tmp_path, "verify", "tiny-v1/", "--key", str(other.public), "--key", str(keys.public))
    assert both.code == 0


@pytest.mark.parametrize("name", ["config.json", "README.md"])
def test_what_was_altered_after_signing(tmp_path: Path, folder: Path, keys: KeyPair, name: str) -> None:
    (folder / "README.md").write_text("no part of the version")
    run(tmp_path, "seal", "tiny-v1", "--key", str(keys.private))
    with (folder / name).open("a") as file:
        file.write(" ")
    refused = run(tmp_path, "verify", "tiny-v1/", "--key", str(keys.public))
    assert refused.code == 3
    assert refused.stderr.startswith(f"error: {name}: is sha256:")
    assert refused.stderr.endswith(f": altered after signing{SIGN_IT}\n")


def test_a_seal_that_is_not_of_this_folder_is_told_with_what_to_do(tmp_path: Path, folder: Path) -> None:
    run(tmp_path, "seal", "tiny-v1")
    (folder / "generation_config.json").write_text("{}")
    ran = run(tmp_path, "verify", "tiny-v1/")
    assert ran.code == 3
    assert ran.stderr == f"error: generation_config.json: is in the folder and not in the seal{SEAL_IT}\n"


def test_a_key_that_cannot_be_used_is_told_before_anything_is_hashed(tmp_path: Path, folder: Path) -> None:
    for command in (("seal", "tiny-v1"), ("verify", "tiny-v1/")):
        ran = run(tmp_path, *command, "--key", "nowhere.pem")
        assert (ran.code, ran.stdout) == (2, "")
        assert ran.stderr == "error: nowhere.pem: No such file or directory\n"


@pytest.mark.parametrize("option", ["--key", "--jobs"])
def test_a_resident_version_is_not_verified_as_folders_are(
    tmp_path: Path, keys: KeyPair, option: str
) -> None:
    ran = run(tmp_path, "verify", "tiny-v1", option, "2" if option == "--jobs" else str(keys.public))
    assert (ran.code, ran.stderr) == (
        2,
        f"error: {option} is for folders: tiny-v1 is a version, ./tiny-v1 a folder\n",
    )


def test_a_key_that_others_can_read_is_used_with_a_warning(
    tmp_path: Path, folder: Path, keys: KeyPair
) -> None:
    keys.private.chmod(0o644)
    ran = run(tmp_path, "seal", "tiny-v1", "--key", str(keys.private))
    assert ran.code == 0
    assert ran.stderr == f"warning: others than its owner can read {keys.private}; chmod 600 it\n"


def test_sealing_without_a_key_leaves_a_signature_that_is_none_any_more(
    tmp_path: Path, folder: Path, keys: KeyPair
) -> None:
    run(tmp_path, "seal", "tiny-v1", "--key", str(keys.private))
    (folder / "config.json").write_text("{}")
    ran = run(tmp_path, "seal", "tiny-v1")
    assert ran.code == 0
    assert ran.stderr.startswith(STALE)
    assert (
        "the seal was altered after signing"
        in run(tmp_path, "verify", "tiny-v1/", "--key", str(keys.public)).stderr
    )


def test_sealing_again_what_has_not_changed_keeps_the_signature_and_does_not_warn(
    tmp_path: Path, folder: Path, keys: KeyPair
) -> None:
    run(tmp_path, "seal", "tiny-v1", "--key", str(keys.private))
    ran = run(tmp_path, "seal", "tiny-v1")
    assert (ran.code, ran.stderr) == (0, "")
    assert run(tmp_path, "verify", "tiny-v1/", "--key", str(keys.public)).code == 0
    # A damaged seal that is made again as it was signed is covered as well.
    (folder / "seal.json").write_text("damaged")
    ran = run(tmp_path, "seal", "tiny-v1")
    assert (ran.code, ran.stderr) == (0, "")
    assert run(tmp_path, "verify", "tiny-v1/", "--key", str(keys.public)).code == 0


@pytest.mark.parametrize("signature", ["not covering the seal", "unreadable", "a folder", "a broken link"])
def test_a_signature_of_no_use_is_warned_of(
    tmp_path: Path, folder: Path, keys: KeyPair, signature: str
) -> None:
    path = folder / "model.sig"
    match signature:
        case "not covering the seal":
            signed = {file.name: file_digest(file.read_bytes()) for file in folder.iterdir()}
            path.write_bytes(
                sign_files("tiny-v1", signed, SigningKey.read(keys.private, str), has_symlinks=False)
            )
            assert run(tmp_path, "verify", "tiny-v1/", "--key", str(keys.public)).code == 0
        case "unreadable":
            path.write_text("{}")
        case "a folder":
            path.mkdir()
        case _:
            path.symlink_to("nowhere")
    ran = run(tmp_path, "seal", "tiny-v1")
    assert ran.code == 0
    assert ran.stderr.startswith(STALE)
    assert run(tmp_path, "verify", "tiny-v1/", "--key", str(keys.public)).code == 3


def test_a_seal_that_was_not_written_does_not_outdate_a_signature(tmp_path: Path, folder: Path) -> None:
    (folder / "model.sig").write_text("x")
    (folder / ".seal.json.0123456789abcdef").mkdir()  # cannot be removed, whoever asks
    ran = run(tmp_path, "seal", "tiny-v1")
    assert ran.code == 3
    assert "warning" not in ran.stderr


def test_a_passphrase_comes_from_the_environment(tmp_path: Path, folder: Path) -> None:
    keys = make_keys(tmp_path / "keys", passphrase="open sesame")
    command = ("seal", "tiny-v1", "--key", str(keys.private))
    variable = "CHANGEOVER_KEY_PASSPHRASE"
    assert run(tmp_path, *command, env=environment(**{variable: "open sesame"})).code == 0
    wrong = run(tmp_path, *command, env=environment(**{variable: "close sesame"}))
    assert (wrong.code, wrong.stderr) == (
        2,
        f"error: {keys.private}: cannot be decrypted with this passphrase\n",
    )
    none = run(tmp_path, *command)
    assert none.code == 2
    assert f"is encrypted; set {variable}, or use a terminal" in none.stderr


def test_a_passphrase_is_asked_for_and_not_shown(tmp_path: Path, folder: Path) -> None:
    keys = make_keys(tmp_path / "keys", passphrase="open sesame")
    terminal = OnTerminal.spawn(tmp_path, "seal", "tiny-v1", "--key", str(keys.private))
    terminal.read_until("passphrase of ")
    os.write(terminal.master, b"open sesame\n")
    ran = terminal.finish()
    assert ran.code == 0
    assert "sealed and signed: tiny-v1" in ran.screen
    assert "sesame" not in ran.screen


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (b"\x04", 2, "error: {key}: is encrypted, and no passphrase was given"),
        (b"\x03", 130, "error: interrupted: nothing was sealed"),
        (b"\n", 2, "error: {key}: cannot be decrypted with this passphrase"),
    ],
    ids=["ctrl-d", "ctrl-c", "nothing"],
)
@pytest.mark.parametrize("is_json", [False, True])
def test_no_passphrase_is_typed(
    tmp_path: Path, folder: Path, typed: bytes, code: int, said: str, is_json: bool
) -> None:
    keys = make_keys(tmp_path / "keys", passphrase="open sesame")
    command = ("seal", "tiny-v1", "--key", str(keys.private), *(["--json"] if is_json else []))
    terminal = OnTerminal.spawn(tmp_path, *command)
    terminal.read_until("passphrase of ")
    os.write(terminal.master, typed)
    ran = terminal.finish()
    assert ran.code == code
    assert f"\n{said.format(key=keys.private)}\n" in ran.screen
    assert not is_json or f'"exit_code":{code}' in ran.screen
    assert "Abort" not in ran.screen
    assert not (folder / "seal.json").exists()
