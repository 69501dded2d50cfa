"""Users and groups of the host, as messages name them, and what the kernel says to one who may not."""

from __future__ import annotations

import errno
import grp
import pwd

FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
"""Errors of a file that this user may not make or write, however often it is tried."""


def user_text(uid: int) -> str:
    """The name and number of a user, as `changeover (uid 990)`; `uid 990` for one without a name."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def group_text(gid: int) -> str:
    """The name of a group, or its number where it has none."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
