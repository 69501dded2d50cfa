"""The rollout machine against every order of answers: all or nothing, decided once, finished once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loaderd.rollout import (
    Abandoned,
    CommitBroke,
    Committed,
    DecisionFailed,
    DecisionLogged,
    Fence,
    Finish,
    LogDecision,
    Phase,
    PrepareBroke,
    Prepared,
    Rollout,
    RolloutEvent,
    SendCommit,
    SendRelease,
)
from shared.errors import DeadlineExceeded, PeerGone, PrepareFailed, ResourceError
from shared.ids import LeaseId


class RolloutMachine(RuleBasedStateMachine):
    """Feeds the machine what a driver could feed it, and remembers what it was told to do."""

    @initialize(count=st.integers(min_value=0, max_value=4))
    def begin(self, count: int) -> None:
        self.leases = [LeaseId(number) for number in range(1, count + 1)]
        self.unanswered = set(self.leases)  # prepare is out
        self.ordered: set[LeaseId] = set()  # commit is out
        self.flipped: set[LeaseId] = set()
        self.released: list[LeaseId] = []
        self.fenced: list[LeaseId] = []
        self.finished: list[Finish] = []
        self.is_logging = False
        self.is_logged = False
        self.rollout, instructions = Rollout.begin(frozenset(self.leases))
        self._take(instructions)

    def _take(self, instructions: tuple[object, ...]) -> None:
        for instruction in instructions:
            match instruction:
                case LogDecision():
                    assert not self.is_logging
                    assert not self.is_logged, "a rollout is decided once"
                    assert not self.unanswered, "decided before everyone was prepared"
                    self.is_logging = True
                case SendCommit(lease):
                    assert self.is_logged, "a commit went out before the decision was on disk"
                    assert lease not in self.ordered | self.flipped
                    self.ordered.add(lease)
                case SendRelease(lease):
                    assert not self.is_logged, "a decided version was released"
                    self.released.append(lease)
                case Fence(lease):
                    self.fenced.append(lease)
                case Finish():
                    self.finished.append(instruction)

    def _feed(self, event: RolloutEvent) -> None:
        self.rollout, instructions = self.rollout.handle(event)
        self._take(instructions)

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data())
    def prepared(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.unanswered)))
        self.unanswered.remove(lease)
        self._feed(Prepared(lease))

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data(), went_away=st.booleans())
    def prepare_breaks(self, data: st.DataObject, went_away: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.unanswered)))
        self.unanswered.remove(lease)
        self._feed(PrepareBroke(lease, PeerGone("gone") if went_away else PrepareFailed("NaN")))

    @rule()
    def abandoned(self) -> None:
        self._feed(Abandoned(DeadlineExceeded("too late")))

    @precondition(lambda self: self.is_logging)
    @rule(is_written=st.booleans())
    def journal_answers(self, is_written: bool) -> None:
        self.is_logging = False
        if is_written:
            self.is_logged = True
            self._feed(DecisionLogged())
        else:
            self._feed(DecisionFailed(ResourceError("disk full")))

    @precondition(lambda self: self.ordered)
    @rule(data=st.data(), is_confirmed=st.booleans())
    def commit_answers(self, data: st.DataObject, is_confirmed: bool) -> None:
        lease = data.draw(st.sampled_from(sorted(self.ordered)))
        self.ordered.remove(lease)
        if is_confirmed:
            self.flipped.add(lease)
            self._feed(Committed(lease))
        else:
            self._feed(CommitBroke(lease, PeerGone("gone")))

    @invariant()
    def all_or_nothing(self) -> None:
        if not hasattr(self, "rollout"):
            return
        if self.flipped or self.ordered or self.fenced:
            assert self.is_logged
            assert not self.released
        assert len(self.finished) <= 1
        assert not set(self.fenced) & self.flipped

    @invariant()
    def it_ends_exactly_when_it_should(self) -> None:
        if not hasattr(self, "rollout"):
            return
        ended = self.rollout.phase in (Phase.COMMITTED, Phase.ABANDONED)
        assert bool(self.finished) == ended
        if self.rollout.phase is Phase.COMMITTED:
            assert self.finished[0].error is None
            assert not self.ordered
            assert self.flipped | set(self.fenced) == set(self.leases)
        if self.rollout.phase is Phase.ABANDONED:
            assert self.finished[0].error is not None
            # Whoever prepared, or may still be preparing, is told to drop it.
            assert self.rollout.prepared | self.unanswered <= set(self.released)


RolloutMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)
TestRollout = RolloutMachine.TestCase
