"""One root for every error, with branches by who must act.

Each error is a class with its facts as attributes; the message says what, which, expected and
found.  Only a process entry turns an error into an exit code, and only `to_wire` flattens it.
"""

from __future__ import annotations

from typing import ClassVar

Fact = str | int | float


class ChangeoverError(Exception):
    """Root of all errors raised on purpose by changeover."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, **facts: Fact) -> None:
        """What is not valid Unicode in the texts (file names and JSON may hold such) is escaped, so that
        an error can always be sent, journaled and shown."""
        self.message = _unicode(message)
        self.facts = {name: _unicode(fact) if isinstance(fact, str) else fact for name, fact in facts.items()}
        super().__init__(self.message)


def _unicode(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


# --- the caller must act -------------------------------------------------------------------------


class CallerError(ChangeoverError):
    """The request cannot be carried out as asked."""

    code = "caller"


class InvalidName(CallerError):
    """A name holds characters that names may not hold."""

    code = "invalid_name"

    def __init__(self, *, what: str, name: str) -> None:
        super().__init__(f"{name!r} is not a valid {what}", what=what, name=name)


class InvalidRequest(CallerError):
    """A request's fields do not fit together or do not fit the state they meet."""

    code = "invalid_request"


class UnknownVersion(CallerError):
    """No folder or resident version has this name."""

    code = "unknown_version"


class NotPermitted(CallerError):
    """The peer's credentials do not allow the verb."""

    code = "not_permitted"


class PlanRefused(CallerError):
    """The plan says that the version cannot work; nothing was changed."""

    code = "refused"


class Superseded(CallerError):
    """A newer push of the same model took this one's place before it was committed."""

    code = "superseded"


class DeadlineExceeded(CallerError):
    """The caller's deadline passed before the work was done."""

    code = "deadline"


class CheckpointError(CallerError):
    """A checkpoint is malformed, changed while it was read, or is not what its seal says.

    `file` is relative to the checkpoint folder, or begins with its name; `tensor` is empty where no
    single tensor is at fault, `byte` is the offset in the file or -1.
    """

    code = "checkpoint"

    def __init__(self, reason: str, *, file: str, tensor: str = "", byte: int = -1) -> None:
        place = file
        if tensor:
            place += f": tensor {tensor!r}"
        if byte >= 0:
            place += f": byte {byte}"
        super().__init__(f"{place}: {reason}", file=file, tensor=tensor, byte=byte, reason=reason)

    @property
    def reason(self) -> str:
        """What is wrong, without the place."""
        return str(self.facts.get("reason", self.message))

    @property
    def file(self) -> str:
        """The file at fault."""
        return str(self.facts.get("file", ""))

    @property
    def tensor(self) -> str:
        """The tensor at fault, or nothing."""
        return str(self.facts.get("tensor", ""))

    @property
    def byte(self) -> int:
        """The offset in the file, or -1."""
        return int(self.facts.get("byte", -1))


class DigestMismatch(CheckpointError):
    """Bytes are not those that a seal, a journal or an earlier read promised."""

    code = "digest_mismatch"


class SignatureRefused(CheckpointError):
    """A folder's signature is missing, malformed, of no trusted key, or not about what the folder holds."""

    code = "signature"


class WarmupFailed(CallerError):
    """A version was mapped and built, but trial prompts show that it cannot serve."""

    code = "warmup"


# --- the peer must act ---------------------------------------------------------------------------


class PeerError(ChangeoverError):
    """The process at the other end of a socket broke the protocol or went away."""

    code = "peer"


class ProtocolError(PeerError):
    """A frame is too large, malformed, of another protocol version or out of order."""

    code = "protocol"


class PeerGone(PeerError):
    """The connection ended while an answer was due."""

    code = "peer_gone"


class StaleEpoch(PeerError):
    """A commit carries an epoch that is not newer than the one in force."""

    code = "stale_epoch"


class PrepareFailed(PeerError):
    """An inference daemon could not prepare a version; `inferd` names it."""

    code = "prepare_failed"


# --- the operator must act -----------------------------------------------------------------------


class ResourceError(ChangeoverError):
    """Something the host should have is missing, too small or held by someone."""

    code = "resource"


class ConfigError(ResourceError):
    """A configuration file is missing, malformed or contradicts itself."""

    code = "config"


class OutOfMemory(ResourceError):
    """An allocation does not fit; facts say what was needed, what was free, on which device and who holds
    the rest, where that is known."""

    code = "out_of_memory"

    def __init__(
        self, *, what: str, needed_bytes: int, free_bytes: int, device: str = "", holders: str = ""
    ) -> None:
        super().__init__(
            f"{what} needs {needed_bytes} bytes, {free_bytes} are free" + (f"; {holders}" if holders else ""),
            what=what,
            needed_bytes=needed_bytes,
            free_bytes=free_bytes,
            **({"device": device} if device else {}),
            **({"holders": holders} if holders else {}),
        )

    @property
    def device(self) -> str:
        """The device that is full, or nothing."""
        return str(self.facts.get("device", ""))

    def naming(self, holders: str) -> OutOfMemory:
        """The same error with the line that names who holds memory."""
        return OutOfMemory(
            what=str(self.facts["what"]),
            needed_bytes=int(self.facts["needed_bytes"]),
            free_bytes=int(self.facts["free_bytes"]),
            device=self.device,
            holders=holders,
        )


class DriverMissing(ResourceError):
    """A library of the machine, such as its GPU driver, is not there or too old."""

    code = "driver_missing"


class SlotBusy(ResourceError):
    """A slot did not drain before the deadline; facts name who holds it and for how long."""

    code = "slot_busy"


class DaemonUnreachable(ResourceError):
    """No daemon answers on the socket."""

    code = "unreachable"


# --- the driver or the kernel said no ------------------------------------------------------------


class DriverError(ChangeoverError):
    """A system or driver call failed; `call` and `number` say which and how."""

    code = "driver"

    def __init__(self, call: str, number: int, detail: str) -> None:
        super().__init__(f"{call} failed with {number}: {detail}", call=call, number=number)

    @property
    def call(self) -> str:
        """The call that failed."""
        return str(self.facts.get("call", ""))

    @property
    def number(self) -> int:
        """What it failed with: errno or a driver's code; 0 where there is none."""
        return int(self.facts.get("number", 0))


class ReadFailed(DriverError):
    """A file could not be read at `byte`; number 0 where it ends there."""

    code = "read_failed"

    def __init__(self, call: str, number: int, detail: str, byte: int) -> None:
        super().__init__(call, number, f"{detail} (byte {byte})" if number else detail)
        self.facts["byte"] = byte

    @property
    def byte(self) -> int:
        """The offset in the file."""
        return int(self.facts.get("byte", -1))


# --- we are wrong --------------------------------------------------------------------------------


class InvariantError(ChangeoverError):
    """Something that cannot happen did; `story` lists the events that led here, oldest first."""

    code = "invariant"
    story: tuple[str, ...] = ()  # of an error from a peer it is in the message only

    def __init__(self, message: str, story: tuple[str, ...] = ()) -> None:
        tail = "".join(f"\n  {line}" for line in story)
        super().__init__(message + tail)
        self.story = story


def error_class(code: str) -> type[ChangeoverError]:
    """The class whose `code` is `code`, or the root for a code this build does not know."""
    pending = [ChangeoverError]
    while pending:
        cls = pending.pop()
        if cls.code == code:
            return cls
        pending.extend(cls.__subclasses__())
    return ChangeoverError


def rebuild_error(code: str, message: str, facts: dict[str, Fact]) -> ChangeoverError:
    """An error received from a peer, as an instance of its class with the peer's message and facts."""
    cls = error_class(code)
    error = cls.__new__(cls)
    ChangeoverError.__init__(error, message, **facts)
    return error
