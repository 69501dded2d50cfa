"""Fields that several messages share: the frozen base, wire errors and version tags."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from shared.errors import ChangeoverError, Fact, rebuild_error
from shared.ids import DIGEST_PATTERN, Digest, VersionRef, VersionTag

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]
DigestText = Annotated[str, Field(pattern=f"^{DIGEST_PATTERN}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


InFlight = Literal["finish", "switch", "restart", "abort"]
"""What becomes of requests that run at the flip: they end on the old version (the default), go on with the
new weights over the keys and values they have, are computed anew on the new weights, or are ended."""


MESSAGE_CHARACTERS = 4_000
FACT_CHARACTERS = 500
"""Of an error's texts; four bytes each at most, so that every error fits a handoff frame."""


class WireModel(BaseModel):
    """Base of everything that crosses a socket: frozen, unknown fields refused, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class WireError(WireModel):
    """An error as it travels: its class by `code`, its message and its facts."""

    code: str
    message: str
    facts: dict[str, str | int | float] = Field(default_factory=dict)

    @classmethod
    def of(cls, error: ChangeoverError) -> Self:
        """Flatten an error for the wire; long texts are cut, since an error must fit the frame."""
        facts = {
            name: cut_text(fact, FACT_CHARACTERS) if isinstance(fact, str) else fact
            for name, fact in error.facts.items()
        }
        return cls(code=error.code, message=cut_text(error.message), facts=facts)

    def to_error(self) -> ChangeoverError:
        """The error as the peer raised it, as an instance of its class."""
        facts: dict[str, Fact] = dict(self.facts)
        return rebuild_error(self.code, self.message, facts)


class Tag(WireModel):
    """A version by name and content."""

    model: Name
    version: Name
    digest: DigestText

    @classmethod
    def of(cls, tag: VersionTag) -> Self:
        """The wire form of a version tag."""
        return cls(model=tag.ref.model, version=tag.ref.version, digest=tag.digest)

    def to_tag(self) -> VersionTag:
        """The version tag as the daemons use it."""
        return VersionTag(VersionRef(self.model, self.version), Digest(self.digest))


def cut_text(text: str, characters: int = MESSAGE_CHARACTERS) -> str:
    """`text`, or its beginning and how long it was."""
    if len(text) <= characters:
        return text
    return f"{text[: characters - 40]}… ({len(text)} characters)"
