"""What a version's bytes were held against when they were read from its folder."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from shared.control import Verified


@dataclass(frozen=True, slots=True)
class Proof:
    """Says something of one content, so it is kept and believed together with the version's digest."""

    verified: Verified = "digest"
    key: str = ""  # hint of the key that had signed it

    def now(self, trusted: Collection[str]) -> Proof:
        """What still counts where these keys, by their hints, are trusted: no signature by another key."""
        return self if self.verified != "signed" or self.key in trusted else Proof()
