"""A slot's life in inferd, as one table.

The table is executed by `Life.advance` and rendered into the states page.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from shared.life import Life, Table


class SlotState(StrEnum):
    """Where a slot is in its life."""

    EMPTY = "empty"
    MAPPING = "mapping"
    WARMING = "warming"
    PREPARED = "prepared"
    SERVING = "serving"
    RETAINED = "retained"
    DRAINING = "draining"
    FAILED = "failed"


class SlotEvent(StrEnum):
    """What can happen to a slot."""

    MAP = "map"  # a version's fds arrived
    MAPPED = "mapped"  # mapped and checked
    WARMED = "warmed"  # built, and trial prompts came out well
    COMMIT = "commit"  # new requests are admitted to it
    RETAIN = "retain"  # the other slot was committed; this one's requests go on
    DRAIN = "drain"  # no new reference may be taken
    RELEASE = "release"  # no reference is left and nothing is mapped
    REOPEN = "reopen"  # it did not drain in time; it stays for rollback
    FAIL = "fail"


S, E = SlotState, SlotEvent

TRANSITIONS: Mapping[tuple[SlotState, SlotEvent], SlotState] = {
    (S.EMPTY, E.MAP): S.MAPPING,
    (S.MAPPING, E.MAPPED): S.WARMING,
    (S.WARMING, E.WARMED): S.PREPARED,
    (S.PREPARED, E.COMMIT): S.SERVING,
    (S.PREPARED, E.DRAIN): S.DRAINING,
    (S.SERVING, E.RETAIN): S.RETAINED,
    (S.SERVING, E.DRAIN): S.DRAINING,  # shutdown
    (S.RETAINED, E.COMMIT): S.SERVING,  # rollback
    (S.RETAINED, E.DRAIN): S.DRAINING,
    (S.DRAINING, E.RELEASE): S.EMPTY,
    (S.DRAINING, E.REOPEN): S.RETAINED,
    (S.MAPPING, E.FAIL): S.FAILED,
    (S.WARMING, E.FAIL): S.FAILED,
    (S.FAILED, E.RELEASE): S.EMPTY,
}

SLOT_TABLE = Table("slot", SlotState.EMPTY, TRANSITIONS)

SlotLife = Life[SlotState, SlotEvent]
