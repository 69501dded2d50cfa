"""`VersionTokenizer`: a version's own tokenizer, safe to use from several threads.

It reads `tokenizer.json` through the `tokenizers` library.  The wrapper of `transformers` changes the
shared tokenizer's truncation on each call, which fails while another thread encodes; it is only asked
to render chat templates.

Loading one keeps the GIL for hundreds of milliseconds, in which no step is launched; versions whose
tokenizer files are the same therefore share one.
"""

from __future__ import annotations

import threading
from hashlib import sha256
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import jinja2
from transformers import AutoTokenizer

from shared.errors import InvalidRequest

_loading = threading.Lock()
_loaded: WeakValueDictionary[bytes, VersionTokenizer] = WeakValueDictionary()


class VersionTokenizer:
    """Implements the engine's `Tokenizer`."""

    @classmethod
    def of(cls, assets: Path) -> Self:
        """The tokenizer of the folder `assets`: one that is in use, if it came from the same files.
        Raises what loading raises."""
        key = _digest(assets)
        with _loading:
            found = _loaded.get(key)
            if not isinstance(found, cls):
                found = cls(assets)
                _loaded[key] = found
            return found

    def __init__(self, assets: Path) -> None:
        """Load from the folder `assets`, offline.  Raises InvalidRequest if it holds no usable tokenizer."""
        if not (assets / "tokenizer.json").is_file():
            raise InvalidRequest("the version has no tokenizer.json")
        try:
            self._wrapper: Any = AutoTokenizer.from_pretrained(
                str(assets), local_files_only=True, trust_remote_code=False
            )
            self._backend: Any = self._wrapper.backend_tokenizer
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest(f"the version's tokenizer cannot be loaded: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Text of `token_ids`, special tokens left out; U+FFFD where bytes make no character."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def apply_chat_template(self, messages: list[dict[str, object]]) -> list[int]:
        """Token ids of the conversation with the generation prompt added."""
        if not self._wrapper.chat_template:
            raise InvalidRequest("the model has no chat template; use the completions endpoint")
        try:
            text = self._wrapper.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, ValueError, TypeError, KeyError) as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)


def _digest(assets: Path) -> bytes:
    """Of every file that is no weight; the library may read any of them."""
    state = sha256()
    for path in sorted(
        path for path in assets.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    ):
        content = path.read_bytes()
        state.update(f"{path.relative_to(assets)}\0{len(content)}\0".encode())
        state.update(content)
    return state.digest()
