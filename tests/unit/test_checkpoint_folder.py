"""Where a folder may lie: below its root, through symlinks that stay there, and nowhere else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from loaderd.checkpoint import checkpoint as module
from loaderd.checkpoint.checkpoint import Checkpoint, open_checkpoint, open_directory
from loaderd.checkpoint.folder import Folder
from loaderd.checkpoint.listing import list_folders
from loaderd.checkpoint.source_file import SourceFile
from shared.errors import CheckpointError, InvariantError, UnknownVersion
from tests.support.procfs import open_fds
from tests.unit.checkpoint_files import pack, safetensors, write_sharded, write_single

TENSORS = {"w": ("U8", [4], b"wwww")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "models"
    root.mkdir()
    return root


def test_the_hub_layout_works(root: Path) -> None:
    blobs = root / "hub" / "blobs"
    snapshot = root / "hub" / "snapshots" / "0123abc"
    write_single(blobs, TENSORS)
    snapshot.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (root / "m-v1").symlink_to("hub/snapshots/0123abc")
    with open_checkpoint([root], "m-v1") as checkpoint:
        assert [tensor.name for tensor in checkpoint.tensors] == ["w"]
        assert checkpoint.name == "m-v1"
        checkpoint.verify_unchanged()


def test_an_absolute_symlink_below_the_root_works(root: Path) -> None:
    write_single(root / "store" / "m-v1", TENSORS)
    (root / "m-v1").symlink_to(root / "store" / "m-v1")
    open_checkpoint([root], "m-v1").close()


def test_a_root_that_is_a_symlink_works(root: Path, tmp_path: Path) -> None:
    write_single(root / "m-v1", TENSORS)
    (root / "m-v2").symlink_to(root.resolve() / "m-v1")
    (tmp_path / "link").symlink_to(root)
    open_checkpoint([tmp_path / "link"], "m-v2").close()


@pytest.mark.parametrize(
    "target", ["../outside", "../models/../outside", "loop/../../outside", "/etc", "//etc"]
)
def test_a_folder_that_leads_out_is_refused(root: Path, tmp_path: Path, target: str) -> None:
    write_single(tmp_path / "outside", TENSORS)
    (root / "loop").mkdir()
    (root / "m-v1").symlink_to(target)
    with pytest.raises(CheckpointError, match="leads out of the model root") as caught:
        open_checkpoint([root], "m-v1")
    assert caught.value.file == "m-v1"


def test_an_absolute_symlink_that_climbs_back_out_is_refused(root: Path, tmp_path: Path) -> None:
    write_single(tmp_path / "outside", TENSORS)
    (root / "m-v1").symlink_to(f"{root.resolve()}/../outside")
    with pytest.raises(CheckpointError, match="leads out of the model root"):
        open_checkpoint([root], "m-v1")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_leads_out_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    outside = write_single(tmp_path / "outside", TENSORS)
    (outside / "tokenizer.json").write_text("{}")
    folder = write_single(root / "m-v1", TENSORS)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(f"../../outside/{name}")
    with pytest.raises(CheckpointError, match="leads out of the model root") as caught:
        open_checkpoint([root], "m-v1")
    assert caught.value.file == name


def test_a_symlink_loop_is_refused(root: Path) -> None:
    (root / "m-v1").symlink_to("m-v2")
    (root / "m-v2").symlink_to("m-v1")
    with pytest.raises(CheckpointError, match="more than 40 symlinks"):
        open_checkpoint([root], "m-v1")


def test_a_dangling_symlink_is_refused(root: Path) -> None:
    folder = write_single(root / "m-v1", TENSORS)
    (folder / "tokenizer.json").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="cannot be opened: No such file") as caught:
        open_checkpoint([root], "m-v1")
    assert caught.value.file == "tokenizer.json"


def test_pipes_devices_and_folders_are_not_opened_as_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_single(root / "m-v1", TENSORS)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    opened: list[object] = []
    real_open = os.open

    def spy(path: str, *args: int, **kwargs: int) -> int:
        opened.append(path)
        return real_open(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", spy)
        with pytest.raises(CheckpointError, match="is not a regular file"):
            open_checkpoint([root], "m-v1")
    assert "m-v1" in opened
    assert "model.safetensors" not in opened
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is a folder, expected a file"):
        open_checkpoint([root], "m-v1")


def test_a_file_that_becomes_a_pipe_before_it_is_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Opening it would wait for a writer that never comes.
    file = write_single(root / "m-v1", TENSORS) / "model.safetensors"
    real_walk = Folder._walk

    def swap_after(folder: Folder, chain: list[int], path: str, *, shown: str) -> str | None:
        leaf = real_walk(folder, chain, path, shown=shown)
        if path == file.name:
            file.unlink()
            os.mkfifo(file)
        return leaf

    before = open_fds()
    with Folder.open(root, "m-v1") as folder:
        monkeypatch.setattr(Folder, "_walk", swap_after)
        with pytest.raises(CheckpointError, match="is not a regular file"):
            folder.open_file(file.name)
    assert open_fds() == before


def test_a_file_that_becomes_a_symlink_before_it_is_opened(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_single(root / "m-v1", TENSORS) / "model.safetensors"
    real_walk = Folder._walk

    def swap_after(folder: Folder, chain: list[int], path: str, *, shown: str) -> str | None:
        leaf = real_walk(folder, chain, path, shown=shown)
        if path == file.name:
            file.unlink()
            file.symlink_to("/etc/passwd")
        return leaf

    with Folder.open(root, "m-v1") as folder:
        monkeypatch.setattr(Folder, "_walk", swap_after)
        with pytest.raises(CheckpointError, match="cannot be opened: Too many levels of symbolic links"):
            folder.open_file(file.name)


@pytest.mark.parametrize("text", ["longer than before", "", "othr"])
def test_a_small_file_that_changes_while_it_is_read_is_refused(root: Path, text: str) -> None:
    (root / "file").write_text("text")
    with Folder.open(root, ".") as folder, SourceFile.open(folder, "file") as source:
        (root / "file").write_text(text)
        os.utime(root / "file", ns=(1, 1))
        with pytest.raises(CheckpointError, match="changed while it was read"):
            source.read_all(100)


def test_a_path_through_a_file_is_refused(root: Path) -> None:
    (root / "file").write_text("")
    (root / "m-v1").symlink_to("file/m-v1")
    with pytest.raises(CheckpointError, match="passes through 'file', which is not a folder"):
        open_checkpoint([root], "m-v1")
    (root / "m-v2").write_text("")
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint([root], "m-v2")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b"])
def test_only_plain_names_are_opened(root: Path, name: str) -> None:
    with Folder.open(root, ".") as folder, pytest.raises(CheckpointError, match="not a plain file name"):
        folder.open_file(name)


def never(folder: Folder) -> str:
    raise AssertionError("there is no seal to look at")


def test_the_first_root_that_has_the_name_is_taken(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_single(tmp_path / name / "m-v1", {name: ("U8", [1], b"x")})
    write_single(tmp_path / "two" / "m-v2", TENSORS)
    roots = [tmp_path / "one", tmp_path / "two"]
    with open_checkpoint(roots, "m-v1") as checkpoint:
        assert checkpoint.tensors[0].name == "one"
    open_checkpoint(roots, "m-v2").close()
    with pytest.raises(UnknownVersion, match="no folder 'm-v3' below"):
        open_checkpoint(roots, "m-v3")
    listed = list_folders([*roots, tmp_path / "missing"], never)
    assert [(entry.name, entry.root) for entry in listed] == [("m-v1", roots[0]), ("m-v2", roots[1])]


def test_listing_leaves_out_what_is_no_checkpoint(root: Path, tmp_path: Path) -> None:
    write_single(root / "m-v1", TENSORS)
    (root / "empty").mkdir()
    (root / "file").write_text("")
    (root / "out").symlink_to(tmp_path)
    (root / ".hidden").mkdir()
    (entry,) = list_folders([root], never)
    assert (entry.name, entry.nbytes, entry.is_sealed) == ("m-v1", len(safetensors(TENSORS)), False)
    (root / "m-v1" / "seal.json").write_text("{}")
    assert list_folders([root], lambda folder: "")[0].is_sealed
    (broken,) = list_folders([root], lambda folder: f"{folder.name} is broken")
    assert (broken.is_sealed, broken.seal_fault) == (False, "m-v1 is broken")


def test_pickles_are_never_read(root: Path) -> None:
    folder = root / "m-v1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint([root], "m-v1")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError, match="only safetensors checkpoints are read"):
        open_checkpoint([root], "m-v1")


def test_assets_are_the_allowed_files_as_they_were_read(root: Path) -> None:
    folder = write_single(root / "m-v1", TENSORS)
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_x.py", "README.md"):
        (folder / name).write_text(name)
    with open_checkpoint([root], "m-v1") as checkpoint:
        assert sorted(checkpoint.assets) == ["chat_template.jinja", "config.json", "tokenizer.json"]
        assert checkpoint.assets["tokenizer.json"] == b"tokenizer.json"
        assert checkpoint.config["model_type"] == "tiny"
        assert checkpoint.ignored == ("modeling_x.py: not part of the checkpoint",)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "is missing"),
        ("[]", "is not a JSON object"),
        ('{"a":1,"a":2}', "duplicate key 'a'"),
        ('{"a":{"b":1,"b":2}}', "duplicate key 'b'"),
        ("{", "is not valid JSON"),
    ],
)
def test_a_config_must_be_one_json_object(root: Path, text: str | None, reason: str) -> None:
    folder = write_single(root / "m-v1", TENSORS)
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_checkpoint([root], "m-v1")
    assert caught.value.file == "config.json"


def test_assets_together_are_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_single(root / "m-v1", TENSORS)
    (folder / "tokenizer.json").write_bytes(b"x" * 100)
    monkeypatch.setattr(module, "ASSET_LIMIT_BYTES", 110)
    with pytest.raises(CheckpointError, match=r"has 100 bytes, \d+ are allowed") as caught:
        open_checkpoint([root], "m-v1")
    assert caught.value.file == "tokenizer.json"


def test_an_index_that_places_nothing_is_refused(root: Path) -> None:
    folder = write_sharded(root / "m-v1", {}, weight_map={})
    with pytest.raises(CheckpointError, match="'weight_map' is missing, empty or not an object"):
        open_checkpoint([root], "m-v1")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(pack("{}"))
    with pytest.raises(CheckpointError, match="holds no tensor"):
        open_checkpoint([root], "m-v1")


def test_no_fd_is_left_after_use_or_refusal(root: Path, tmp_path: Path) -> None:
    write_sharded(
        root / "m-v1", {f"s{index}.safetensors": {f"t{index}": ("U8", [1], b"x")} for index in range(3)}
    )
    bad = write_sharded(root / "m-v2", {"a.safetensors": TENSORS, "b.safetensors": {"x": ("U8", [1], b"x")}})
    (bad / "b.safetensors").write_bytes(b"short")
    (root / "m-v3").symlink_to(tmp_path)
    before = open_fds()
    with open_checkpoint([root], "m-v1") as checkpoint:
        assert len(open_fds() - before) == 3 + 2  # files, and the folders from the root down
        checkpoint.verify_unchanged()
    for name in ("m-v2", "m-v3"):
        with pytest.raises(CheckpointError):
            open_checkpoint([root], name)
    list_folders([root], never)
    assert open_fds() == before
    checkpoint.close()
    with pytest.raises(InvariantError, match="is closed"):
        checkpoint.borrow_fd("s0.safetensors")


def test_a_directory_of_ones_own_may_lie_anywhere(root: Path, tmp_path: Path) -> None:
    folder = write_single(tmp_path / "elsewhere" / "m-v1", TENSORS)
    (root / "link").symlink_to(folder)
    with open_directory(root / "link") as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        assert json.loads(checkpoint.assets["config.json"])["hidden_size"] == 4
