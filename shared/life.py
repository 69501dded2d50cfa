"""State machines as tables: executed by the code, rendered into the states page, told as a story."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Self, TypeVar

from shared.errors import InvariantError

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)

STORY_STEPS = 32
"""How many of the newest steps a life remembers."""


@dataclass(frozen=True, slots=True)
class Table(Generic[State, Event]):
    """Every step that is allowed, and nothing else is."""

    noun: str  # what lives, for messages
    first: State
    steps: Mapping[tuple[State, Event], State]

    def begin(self) -> Life[State, Event]:
        """A life in its first state."""
        return Life(self, self.first, (str(self.first),))

    def render(self) -> str:
        """The table as Markdown."""
        rows = ["| from | event | to |", "|---|---|---|"]
        rows += [f"| {state} | {event} | {following} |" for (state, event), following in self.steps.items()]
        return "\n".join(rows) + "\n"


@dataclass(frozen=True, slots=True)
class Life(Generic[State, Event]):
    """Where something is in its table, and the steps that led there (newest last)."""

    table: Table[State, Event] = field(repr=False)
    state: State
    story: tuple[str, ...] = field(compare=False)

    def advance(self, event: Event, cause: str) -> Self:
        """The life after `event`; raises InvariantError with the story if the table has no such step."""
        following = self.table.steps.get((self.state, event))
        if following is None:
            raise InvariantError(
                f"a {self.table.noun} that is {self.state} cannot {event} ({cause})", self.story
            )
        step = f"{self.state} --{event}--> {following}: {cause}"
        return type(self)(self.table, following, (*self.story, step)[-STORY_STEPS:])
