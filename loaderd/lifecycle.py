"""A version's life in loaderd, as one table.

The table is executed by `Life.advance` and rendered into the states page.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from shared.life import Life, Table


class VersionState(StrEnum):
    """Where a version is in its life."""

    REQUESTED = "requested"
    PLANNED = "planned"
    LOADING = "loading"
    RESIDENT = "resident"
    PREPARING = "preparing"
    PREPARED = "prepared"
    ACTIVE = "active"
    RETAINED = "retained"
    DRAINING = "draining"
    FREED = "freed"
    FAILED = "failed"


class VersionEvent(StrEnum):
    """What can happen to a version."""

    PLAN = "plan"  # the plan says it can work
    LOAD = "load"  # slabs are allocated, reading begins
    VERIFY = "verify"  # every resident byte was hashed and is what it should be
    ADOPT = "adopt"  # memory that survived a restart was handed back and verified
    PREPARE = "prepare"  # inference daemons are asked to map, build and warm it
    PREPARED = "prepared"  # every one of them did
    COMMIT = "commit"  # the epoch is journaled and the flips are ordered
    CONFIRM = "confirm"  # after a restart: it is what serves
    RETAIN = "retain"  # another version serves, this one stays for rollback
    SWEEP = "sweep"  # its slot or its memory is needed
    RELEASE = "release"  # nobody maps it any more
    FAIL = "fail"


S, E = VersionState, VersionEvent

TRANSITIONS: Mapping[tuple[VersionState, VersionEvent], VersionState] = {
    (S.REQUESTED, E.PLAN): S.PLANNED,
    (S.REQUESTED, E.ADOPT): S.RESIDENT,
    (S.PLANNED, E.LOAD): S.LOADING,
    (S.LOADING, E.VERIFY): S.RESIDENT,
    (S.RESIDENT, E.PREPARE): S.PREPARING,
    (S.RESIDENT, E.CONFIRM): S.ACTIVE,
    (S.RESIDENT, E.RETAIN): S.RETAINED,
    (S.RESIDENT, E.SWEEP): S.DRAINING,
    (S.PREPARING, E.PREPARED): S.PREPARED,
    (S.PREPARING, E.RETAIN): S.RETAINED,  # a rollback that did not come about
    (S.PREPARED, E.COMMIT): S.ACTIVE,
    (S.PREPARED, E.RETAIN): S.RETAINED,
    (S.ACTIVE, E.RETAIN): S.RETAINED,
    (S.RETAINED, E.PREPARE): S.PREPARING,
    (S.RETAINED, E.SWEEP): S.DRAINING,
    (S.DRAINING, E.RELEASE): S.FREED,
    **{
        (state, E.FAIL): S.FAILED
        for state in (S.REQUESTED, S.PLANNED, S.LOADING, S.RESIDENT, S.PREPARING, S.PREPARED)
    },
}

ENDED = frozenset({VersionState.FREED, VersionState.FAILED})

VERSION_TABLE = Table("version", VersionState.REQUESTED, TRANSITIONS)

VersionLife = Life[VersionState, VersionEvent]
