"""Groups, as the system's databases have them: those of a peer's user, and the one of a name."""

from __future__ import annotations

import grp
import os
import pwd

from loaderd.authorisation import Group
from shared.errors import ConfigError


def groups_of(uid: int, gid: int) -> frozenset[int]:
    """All groups of user `uid` beside its primary group `gid`; only `gid` for an unknown user.

    The kernel reports a peer's primary group alone, so membership is looked up by user.
    """
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        return frozenset({gid})
    return frozenset(os.getgrouplist(name, gid))


def configured_group(key: str, name: str | None) -> Group | None:
    """The group that a key of the configuration names, if any; raises ConfigError if there is none."""
    if name is None:
        return None
    try:
        return Group(grp.getgrnam(name).gr_gid, name)
    except (KeyError, ValueError) as error:  # ValueError: it has a NUL, or cannot be encoded
        raise ConfigError(
            f"{key}: group {name!r} does not exist; correct the name, or make it: groupadd --system {name!r}"
        ) from error
