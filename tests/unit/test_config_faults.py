"""What an operator reads of a wrong value, for every key of both daemons."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from inferd.config import ApiConfig, EngineConfig, InferdConfig
from loaderd.config import LoaderdConfig, ModelConfig
from shared.config_file import ConfigModel, load_config
from shared.errors import ConfigError

LEAST = {LoaderdConfig: {"model_roots": '["/srv"]'}, InferdConfig: {"name": '"a"', "model": '"m"'}}
WRONG = {
    "true": "true",
    "7": "7",
    "-1": "-1",
    "1.5": "1.5",
    "1e99": "1e+99",
    "nan": "nan",
    "1_000_000_000_000_000": "1000000000000000",
    '""': "text or ''",
    '"no\u202esuch\\nthing"': "text or 'no\\u202esuch\\nthing'",
    "[]": "an empty list",
    "[7, 7]": "a list of 2",
    '["a", "a"]': "a list of 2",
    "{a = 1}": "a table",
    "2026-01-02": "2026-01-02 (text needs quotes)",
}


PYDANTICS = re.compile(r"[Ii]nput|Value error|valid |literal|tuple|dict|None|\[str|function")
TABLES: tuple[tuple[type[ConfigModel], str, type[ConfigModel]], ...] = (
    (LoaderdConfig, "", LoaderdConfig),
    (LoaderdConfig, "models.m.", ModelConfig),
    (InferdConfig, "", InferdConfig),
    (InferdConfig, "engine.", EngineConfig),
    (InferdConfig, "api.", ApiConfig),
)
KEYS = [(model, prefix + name) for model, prefix, table in TABLES for name in table.model_fields]


def told(tmp_path: Path, model: type[ConfigModel], /, **lines: str) -> str:
    """What is said of the least configuration with these lines, without the file's name."""
    path = tmp_path / "daemon.toml"
    path.write_text("\n".join(f"{key} = {value}" for key, value in {**LEAST[model], **lines}.items()))
    with pytest.raises(ConfigError) as caught:
        load_config(path, model)
    return caught.value.message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(("model", "key"), KEYS, ids=[key for _, key in KEYS])
def test_each_key_says_what_it_expects_and_what_was_found(
    tmp_path: Path, model: type[ConfigModel], key: str
) -> None:
    refused = 0
    for value, found in WRONG.items():
        try:
            said = told(tmp_path, model, **{key: value})
        except pytest.fail.Exception:
            continue  # it is right for this key
        refused += 1
        assert "\n" not in said
        assert not PYDANTICS.search(said)
        for fault in said.split("; "):
            place, words = fault.split(": ", 1)
            assert re.fullmatch(rf"{re.escape(key)}(\.\w+)?", place) or place in ("models.m", "engine")
            if words.startswith("expected") and place == key:
                assert words.rpartition(", found ")[2] in (found, *found.split(" or ", 1))
            elif not words.startswith("expected"):
                assert re.match(
                    r"unknown key|names .* twice|a: No such file|trusted_keys and verify|m\w+_\w+ \d+", words
                )
    assert refused >= len(WRONG) // 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("throttle_above_share", '"of"', "expected a number or 'off', found 'of'"),
        ("throttle_above_share", "true", "expected a number or 'off', found true"),
        ("throttle_above_share", "11", "expected at most 10 or 'off', found 11"),
        ("models.m.devices", '"al"', "expected a list or 'all', found 'al'"),
        ("models.m.devices", "[]", "expected a list of at least 1 or 'all', found an empty list"),
        ("models.m.devices", '["G1", "G2", "G1"]', "names G1 twice"),
        ("models.m.prepare_timeout_s", "90000", "expected at most 86400, found 90000"),
        ("pool_bytes", "1", "expected at least 67108864, found 1"),
        ("model_roots", '["/srv", "/srv/"]', "names /srv twice"),
        ("state_dir", '""', "expected a path, found ''"),
        ("run_dir", r'"a\u0000b"', r"expected a path, found 'a\x00b'"),
    ],
)
def test_what_is_said_of_loaderds_keys(tmp_path: Path, key: str, value: str, said: str) -> None:
    assert told(tmp_path, LoaderdConfig, **{key: value}) == f"{key}: {said}"


def test_of_a_list_the_entry_at_fault_is_named_and_not_the_other_choice(tmp_path: Path) -> None:
    said = told(tmp_path, LoaderdConfig, **{"models.m.devices": '["a", 7]'})
    assert said == "models.m.devices.1: expected text, found 7"


def test_a_model_with_no_name(tmp_path: Path) -> None:
    assert told(tmp_path, LoaderdConfig, **{'models."a b".verify': '"sealed"'}) == (
        "models.a b: the key itself: expected a name of letters, digits, '.', '_' and '-' that begins with a "
        "letter or digit, found 'a b'"
    )


@pytest.mark.parametrize("listen", ["8000", "here:port", "unix:here", "a:123456"])
def test_an_address_that_is_none(tmp_path: Path, listen: str) -> None:
    said = told(tmp_path, InferdConfig, listen=f'"{listen}"')
    assert said == f"listen: expected HOST:PORT or unix:/PATH, found {listen!r}"


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("127.0.0.1:80000", "expected a port of at most 65535, found 80000"),
        ("unix:/" + "x" * 107, f"expected a path of at most 107 bytes, found {'/' + 'x' * 59!r}…"),
        (r"unix:/a\u0000b", r"expected HOST:PORT or unix:/PATH, found 'unix:/a\x00b'"),
    ],
)
def test_an_address_that_the_kernel_would_not_take(tmp_path: Path, listen: str, said: str) -> None:
    assert told(tmp_path, InferdConfig, listen=f'"{listen}"') == f"listen: {said}"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            {"engine.max_batch_tokens": "4", "engine.max_sequences": "8"},
            "engine: max_sequences 8 exceeds max_batch_tokens 4: "
            "a step could not give each running sequence its next token",
        ),
        (
            {"engine.max_sequences": "1000"},
            "engine: max_sequences 1000 exceeds max_batch_tokens 512: "
            "a step could not give each running sequence its next token",
        ),
        (
            {"engine.mixed_batch_tokens": "63"},
            "engine: mixed_batch_tokens 63 must lie between max_sequences 64 and max_batch_tokens 512",
        ),
        (
            {"engine.mixed_batch_tokens": "513"},
            "engine: mixed_batch_tokens 513 must lie between max_sequences 64 and max_batch_tokens 512",
        ),
        ({"engine.max_waiting": "0"}, "engine.max_waiting: expected at least 1, found 0"),
        ({"engine.kv_cache_bytes": "8"}, "engine.kv_cache_bytes: expected at least 1048576, found 8"),
    ],
)
def test_what_the_engine_would_refuse_the_configuration_does(
    tmp_path: Path, lines: dict[str, str], said: str
) -> None:
    assert told(tmp_path, InferdConfig, **lines) == said


def test_a_key_that_is_not_told_by_its_path(tmp_path: Path) -> None:
    said = told(tmp_path, LoaderdConfig, **{"models.m.trusted_keys": "[7]", "models.m.verify": '"signed"'})
    assert said == "models.m.trusted_keys.0: expected the path of a PEM file, found 7"


@pytest.mark.parametrize("digits", ["1" * 5000, "0x" + "1" * 5000])
def test_a_number_that_python_does_not_read(tmp_path: Path, digits: str) -> None:
    assert told(tmp_path, LoaderdConfig, pool_bytes=digits) == "holds a number of thousands of digits"
