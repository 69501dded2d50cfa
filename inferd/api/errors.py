"""How an error looks to a client of OpenAI's API: a status, and an object that names the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from inferd.api.admission import NotReady
from shared.errors import CallerError, ChangeoverError, ResourceError

CONTEXT_LENGTH_EXCEEDED: Final = "context_length_exceeded"
_SHOWN_CHARS: Final = 200  # of what a client sent, when a message repeats it


class BadRequest(CallerError):
    """A request is malformed or asks for what this server does not do; `param` names the field."""

    code = "bad_request"

    def __init__(self, message: str, *, param: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.reason = reason  # OpenAI's error code


class ModelNotFound(CallerError):
    """A request names a model that this daemon does not serve."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(f"The model {shown(model)} does not exist.")


class BodyTooLarge(CallerError):
    """A request's body is longer than the limit; the rest of it was not read."""

    code = "body_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The request body is larger than {limit_bytes} bytes.", limit_bytes=limit_bytes)


class QueueFull(ResourceError):
    """The engine takes no more sequences for now."""

    code = "queue_full"


class GenerationFailed(ChangeoverError):
    """The engine ended a sequence with an error; the message is for the log, not for the client."""

    code = "generation_failed"


class GenerationAborted(ChangeoverError):
    """A sequence was ended from this side before it was complete; the caller may ask again."""

    code = "aborted"


@dataclass(frozen=True, slots=True)
class Fault:
    """An error as it goes over the wire."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    may_retry: bool = False  # a Retry-After header goes with it

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def fault_of(error: ChangeoverError) -> Fault:
    """What a client is told about `error`.  Of errors that the caller cannot do anything about, only
    the fact is told."""
    match error:
        case BadRequest():
            return Fault(400, "invalid_request_error", error.message, error.param, error.reason)
        case ModelNotFound():
            return Fault(404, "invalid_request_error", error.message, "model", error.code)
        case BodyTooLarge():
            return Fault(413, "invalid_request_error", error.message, None, "request_too_large")
        case QueueFull():
            message = "Too many requests are waiting."
            return Fault(429, "rate_limit_error", message, None, error.code, may_retry=True)
        case NotReady() | GenerationAborted():
            return Fault(503, "server_error", error.message, None, error.code, may_retry=True)
        case CallerError():
            return Fault(400, "invalid_request_error", error.message)
        case _:
            return INTERNAL


INTERNAL: Final = Fault(
    500, "server_error", "The server had an error while processing your request.", None, "internal_error"
)


def bad_request(error: ValidationError) -> BadRequest:
    """The first thing that is wrong with a request, naming the parameter as a client would write it."""
    detail = error.errors(include_url=False)[0]
    param = _param(detail)
    match detail["type"]:
        case "json_invalid":
            return BadRequest(f"The request body is not valid JSON: {detail['msg']}", reason="invalid_json")
        case "model_type" | "model_attributes_type" if not detail["loc"]:
            return BadRequest("The request body is not a JSON object.", reason="invalid_json")
        case "missing":
            return BadRequest(
                f"Missing required parameter: '{param}'.", param=param, reason="missing_parameter"
            )
        case "extra_forbidden":
            return BadRequest(f"Unknown parameter: {shown(param)}.", param=param, reason="unknown_parameter")
        case "unsupported":
            return BadRequest(detail["msg"], param=param, reason="unsupported_parameter")
        case kind:
            reason = "invalid_type" if kind.endswith("_type") else "invalid_value"
            return BadRequest(f"Invalid value for '{param}': {detail['msg']}.", param=param, reason=reason)


def shown(text: str) -> str:
    """`text` from a client, quoted, escaped and cut: fit for a message or a log line."""
    cut = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
    return ascii(cut) if not cut.isprintable() else f"'{cut}'"


def _param(detail: ErrorDetails) -> str:
    context: Mapping[str, object] = detail.get("ctx") or {}
    named = context.get("param")
    if isinstance(named, str):
        return named
    path = ""
    for step in detail["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path[:_SHOWN_CHARS]
