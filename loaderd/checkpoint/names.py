"""Which files of a folder mean what.  What is not named here is never loaded."""

from __future__ import annotations

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SEAL_FILE = "seal.json"
SIGNATURE_FILE = "model.sig"
CONFIG_FILE = "config.json"

TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        "sentencepiece.bpe.model",
        "special_tokens_map.json",
        "spiece.model",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)

ASSET_FILES = TOKENIZER_FILES | {CONFIG_FILE, "generation_config.json"}
"""Read once, digested and shipped to the inference daemons.  Never code."""

_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".pkl", ".pt", ".pth",
)  # fmt: skip
_SHOWN_CHARS = 256
_PARTIAL_SUFFIXES = (".aria2", ".crdownload", ".incomplete", ".part", ".partial", ".tmp")


def is_weight_like(name: str) -> bool:
    """Whether other tools would take the file for weights or for model code."""
    return name.endswith((*_WEIGHT_SUFFIXES, ".safetensors.index.json", ".py"))


def is_partial(name: str) -> bool:
    """Whether the name is one that downloaders give to a file that is not complete yet."""
    return name.endswith(_PARTIAL_SUFFIXES)


def is_shard_name(name: str) -> bool:
    """Whether an index may name this file: plain, visible, safetensors."""
    return (
        name.endswith(".safetensors") and not name.startswith(".") and "/" not in name and name.isprintable()
    )


def shown(name: str) -> str:
    """A name as messages carry it: short, and valid UTF-8 whatever the file system or header held."""
    return name[:_SHOWN_CHARS].encode("utf-8", "backslashreplace").decode("utf-8")
