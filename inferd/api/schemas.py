"""What a request may hold.

Types are strict (`true` is not 1, "1" is not 1, 1.0 is not a token count), numbers are finite, ranges are
checked, and a parameter that is not listed here is refused: a client that misspells one would otherwise
get an answer it did not ask for.  Parameters that this server does not carry out are listed too, so that
the refusal names them; their neutral values pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from inferd.api.errors import bad_request

MAX_LOGPROBS: Final = 20
_MAX_STOPS: Final = 4
_MAX_TOKEN_ID: Final = 2**31 - 1
_TOKEN_ID: Final = re.compile(r"[0-9]{1,10}")
SESSION_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


def _refused(*neutral: object) -> BeforeValidator:
    """Refuses a parameter unless it is absent, null or one of `neutral`."""

    def check(value: object, info: ValidationInfo) -> None:
        if value is None or any(type(value) is type(item) and value == item for item in neutral):
            return
        raise PydanticCustomError(
            "unsupported", "'{name}' is not supported by this server.", {"name": info.field_name}
        )

    return BeforeValidator(check)


def _invalid(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("invalid", "{message}", {"message": message, "param": param})


def _unsupported(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("unsupported", "{message}", {"message": message, "param": param})


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content_type", "Input should be a string or a list of text parts")
    return value


def _as_prompts(value: object) -> object:
    """Every form of `prompt` as a list of texts or lists of token ids."""
    match value:
        case str():
            return [value]
        case [] | [[], *_]:
            raise PydanticCustomError("empty", "Input should not be empty")
        case [str(), *_] if all(isinstance(item, str) for item in value):
            return value
        case [int(), *_] if _are_token_ids(value):
            return [value]
        case [[*_], *_] if all(isinstance(item, list) and item and _are_token_ids(item) for item in value):
            return value
        case _:
            raise PydanticCustomError(
                "prompt_type",
                "Input should be a string, a list of strings, or one or more lists of token ids",
            )


def _are_token_ids(items: Sequence[object]) -> bool:
    return all(type(item) is int and 0 <= item <= _MAX_TOKEN_ID for item in items)


def _as_bias(value: object) -> object:
    if isinstance(value, dict) and not all(
        key.isascii() and key.isdigit() and len(key) < 11 for key in value
    ):
        raise PydanticCustomError("bias_key", "Keys should be token ids")
    return value


class Strict(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """What a stream carries besides the text."""

    include_usage: bool = False
    include_obfuscation: Annotated[Any, _refused(False)] = None


class GenerationRequest(Strict):
    """What both endpoints take."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=512)]],
            BeforeValidator(_as_list),
            Field(max_length=_MAX_STOPS),
        ]
        | None
    ) = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(_as_bias),
            Field(max_length=1024),
        ]
        | None
    ) = None
    # As other servers have them.
    top_k: Annotated[int, Field(ge=-1, le=_MAX_TOKEN_ID)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, le=_MAX_TOKEN_ID)]], Field(max_length=128)] | None
    ) = None
    session_id: Annotated[str, Field(pattern=rf"^{SESSION_ID.pattern}$")] | None = None
    # Says who asks, not what is asked: accepted, not used.
    user: Annotated[str, Field(max_length=512)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _invalid("stream_options", "It is only allowed when 'stream' is true")
        return self

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def choices_per_prompt(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class TextPart(Strict):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Strict):
    """One message of a conversation; a message of a response can be sent back as it is."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_as_parts)]
    name: Annotated[str, Field(max_length=256)] | None = None
    refusal: Annotated[Any, _refused()] = None
    annotations: Annotated[Any, _refused([])] = None
    audio: Annotated[Any, _refused()] = None
    tool_calls: Annotated[Any, _refused([])] = None
    tool_call_id: Annotated[Any, _refused()] = None
    function_call: Annotated[Any, _refused()] = None

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None  # accepted, not used
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None  # accepted, not used
    parallel_tool_calls: bool | None = None  # there are no tools
    response_format: Annotated[Any, _refused({"type": "text"})] = None
    tools: Annotated[Any, _refused([])] = None
    tool_choice: Annotated[Any, _refused("none", "auto")] = None
    functions: Annotated[Any, _refused([])] = None
    function_call: Annotated[Any, _refused("none", "auto")] = None
    modalities: Annotated[Any, _refused(["text"])] = None
    audio: Annotated[Any, _refused()] = None
    prediction: Annotated[Any, _refused()] = None
    reasoning_effort: Annotated[Any, _refused("none")] = None
    verbosity: Annotated[Any, _refused("medium")] = None
    web_search_options: Annotated[Any, _refused()] = None
    moderation: Annotated[Any, _refused()] = None
    prompt_cache_options: Annotated[Any, _refused()] = None
    prompt_cache_retention: Annotated[Any, _refused("in_memory")] = None
    service_tier: Annotated[Any, _refused("auto", "default")] = None
    store: Annotated[Any, _refused(False)] = None

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid("top_logprobs", "It is only allowed when 'logprobs' is true")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise _invalid("max_tokens", "It contradicts 'max_completion_tokens'")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_as_prompts)]  # each a str or a list[int]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    suffix: Annotated[Any, _refused("")] = None

    @property
    def prompt_count(self) -> int:
        return len(self.prompt)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.best_of is not None and self.best_of != self.choices_per_prompt:
            raise PydanticCustomError(
                "unsupported",
                "'best_of' other than 'n' is not supported by this server.",
                {"param": "best_of"},
            )
        if self.echo and self.logprobs is not None:
            raise _unsupported("echo", "'echo' with 'logprobs' is not supported by this server.")
        return self


R = TypeVar("R", bound=GenerationRequest)


def parse_request(kind: type[R], body: bytes) -> R:
    """`body` as a request; raises BadRequest, which says what is wrong and where."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise bad_request(error) from None
