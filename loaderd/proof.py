"""What a version's bytes were held against when they were read from its folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import get_args

from shared.control import Verified

_WEAKEST_FIRST = get_args(Verified)


@dataclass(frozen=True, slots=True)
class Proof:
    """Says something of one content, so it is kept and believed together with the version's digest."""

    verified: Verified = "digest"
    key: str = ""  # hint of the key that had signed it

    def now(self, trusted: Collection[str]) -> Proof:
        """What still counts where these keys, by their hints, are trusted: no signature by another key."""
        return self if self.verified != "signed" or self.key in trusted else Proof()

    def with_later(self, later: Proof) -> Proof:
        """What counts of two proofs of one content: the stronger, of equal ones the later."""
        is_weaker = _WEAKEST_FIRST.index(later.verified) < _WEAKEST_FIRST.index(self.verified)
        return self if is_weaker else later
