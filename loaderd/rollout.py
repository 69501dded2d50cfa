"""Two-phase commit of one version over all inference daemons of a model, as a pure machine.

Every participant prepares, or none commits.  The decision is journaled before the first commit is
sent; from then on the rollout cannot fail, it can only have stragglers, which are fenced by the
epoch and brought to the active version when they attach again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import assert_never

from shared.errors import ChangeoverError, InvariantError
from shared.ids import LeaseId


class Phase(StrEnum):
    """How far a rollout has come."""

    PREPARING = "preparing"
    DECIDING = "deciding"  # all prepared; the journal entry is being written
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """A participant mapped, checked, built and warmed the version."""

    lease: LeaseId


@dataclass(frozen=True, slots=True)
class PrepareBroke:
    """A participant could not prepare, or went away while it did."""

    lease: LeaseId
    error: ChangeoverError


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The push was superseded or ran out of time before the decision."""

    error: ChangeoverError


@dataclass(frozen=True, slots=True)
class DecisionLogged:
    """The journal holds the commit; it will be carried out even if loaderd dies now."""


@dataclass(frozen=True, slots=True)
class DecisionFailed:
    """The journal could not be written, so nothing was decided."""

    error: ChangeoverError


@dataclass(frozen=True, slots=True)
class Committed:
    """A participant serves the version."""

    lease: LeaseId


@dataclass(frozen=True, slots=True)
class CommitBroke:
    """A participant did not confirm the commit: it went away, refused or took too long."""

    lease: LeaseId
    error: ChangeoverError


RolloutEvent = Prepared | PrepareBroke | Abandoned | DecisionLogged | DecisionFailed | Committed | CommitBroke

# --- instructions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogDecision:
    """Write the commit to the journal, durably."""


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Order the flip."""

    lease: LeaseId


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Have a participant drop what it prepared or is preparing."""

    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Fence:
    """End the lease of a straggler; it must attach again and be brought up to date."""

    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Finish:
    """The rollout is over; `error` is None if the version is active."""

    error: ChangeoverError | None


Instruction = LogDecision | SendCommit | SendRelease | Fence | Finish

Step = tuple["Rollout", tuple[Instruction, ...]]


@dataclass(frozen=True, slots=True)
class Rollout:
    """A snapshot of one rollout; `handle` is the only way to another."""

    participants: frozenset[LeaseId]
    prepared: frozenset[LeaseId] = frozenset()
    committed: frozenset[LeaseId] = frozenset()
    stragglers: frozenset[LeaseId] = frozenset()
    phase: Phase = Phase.PREPARING
    story: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def begin(cls, participants: frozenset[LeaseId]) -> Step:
        """Start a rollout.  Without participants the version becomes active at once, and whoever
        attaches later is given it."""
        rollout = cls(participants)
        if participants:
            return rollout, ()
        return replace(rollout, phase=Phase.DECIDING), (LogDecision(),)

    def handle(self, event: RolloutEvent) -> Step:
        """The rollout after `event` and what is to be done.  Raises InvariantError for an event that
        cannot happen in this phase; late answers of participants after the end are ignored."""
        told = replace(self, story=(*self.story, f"{self.phase}: {event}")[-64:])
        match event:
            case Prepared():
                return told._on_prepared(event)
            case PrepareBroke():
                return told._on_prepare_broke(event)
            case Abandoned():
                return told._on_abandoned(event.error)
            case DecisionLogged():
                return told._on_decision_logged()
            case DecisionFailed():
                return told._on_decision_failed(event.error)
            case Committed():
                return told._on_committed(event)
            case CommitBroke():
                return told._on_commit_broke(event)
            case _:
                assert_never(event)

    def _on_prepared(self, event: Prepared) -> Step:
        self._check_participant(event.lease)
        if self.phase is Phase.ABANDONED:
            return self, ()
        if self.phase is not Phase.PREPARING or event.lease in self.prepared:
            raise InvariantError(f"lease {event.lease} prepared twice or too late", self.story)
        prepared = self.prepared | {event.lease}
        if prepared != self.participants:
            return replace(self, prepared=prepared), ()
        return replace(self, prepared=prepared, phase=Phase.DECIDING), (LogDecision(),)

    def _on_prepare_broke(self, event: PrepareBroke) -> Step:
        self._check_participant(event.lease)
        if event.lease in self.prepared:
            raise InvariantError(f"lease {event.lease} prepared and then failed to", self.story)
        if self.phase is Phase.PREPARING:
            return self._abandon(event.error, gone=event.lease)
        return self, ()

    def _on_abandoned(self, error: ChangeoverError) -> Step:
        if self.phase is Phase.PREPARING:
            return self._abandon(error, gone=None)
        return self, ()

    def _abandon(self, error: ChangeoverError, gone: LeaseId | None) -> Step:
        others = sorted(lease for lease in self.participants if lease != gone)
        return replace(self, phase=Phase.ABANDONED), (
            *(SendRelease(lease) for lease in others),
            Finish(error),
        )

    def _on_decision_logged(self) -> Step:
        if self.phase is not Phase.DECIDING:
            raise InvariantError("a decision was journaled that was not due", self.story)
        if not self.participants:
            return replace(self, phase=Phase.COMMITTED), (Finish(None),)
        orders = tuple(SendCommit(lease) for lease in sorted(self.participants))
        return replace(self, phase=Phase.COMMITTING), orders

    def _on_decision_failed(self, error: ChangeoverError) -> Step:
        if self.phase is not Phase.DECIDING:
            raise InvariantError("a decision failed that was not due", self.story)
        return self._abandon(error, gone=None)

    def _on_committed(self, event: Committed) -> Step:
        self._check_participant(event.lease)
        if self.phase is not Phase.COMMITTING:
            raise InvariantError(f"lease {event.lease} committed without an order", self.story)
        return replace(self, committed=self.committed | {event.lease})._finish_if_all_answered()

    def _on_commit_broke(self, event: CommitBroke) -> Step:
        self._check_participant(event.lease)
        if self.phase is not Phase.COMMITTING:
            raise InvariantError(f"the commit of lease {event.lease} broke without an order", self.story)
        told = replace(self, stragglers=self.stragglers | {event.lease})
        rollout, instructions = told._finish_if_all_answered()
        return rollout, (Fence(event.lease), *instructions)

    def _finish_if_all_answered(self) -> Step:
        if self.committed | self.stragglers != self.participants:
            return self, ()
        return replace(self, phase=Phase.COMMITTED), (Finish(None),)

    def _check_participant(self, lease: LeaseId) -> None:
        if lease not in self.participants:
            raise InvariantError(f"lease {lease} takes no part in this rollout", self.story)
