"""The groups of a peer's user, as the system's databases have them."""

from __future__ import annotations

import os
import pwd


def groups_of(uid: int, gid: int) -> frozenset[int]:
    """All groups of user `uid` beside its primary group `gid`; only `gid` for an unknown user.

    The kernel reports a peer's primary group alone, so membership is looked up by user.
    """
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return frozenset({gid})
    return frozenset(os.getgrouplist(name, gid))
