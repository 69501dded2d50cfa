"""Who may do what: a pure decision from peer credentials and the configured group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from shared.errors import NotPermitted, ProtocolError


class Right(StrEnum):
    """What a verb needs."""

    READ = "read"  # anyone who reaches the socket
    CHANGE = "change"  # root, the daemon's own user, the admin group
    ATTACH = "attach"  # those, and the group of the inferds


RIGHTS: Mapping[str, Right] = {
    "status": Right.READ,
    "versions": Right.READ,
    "history": Right.READ,
    "operation": Right.READ,
    "diff": Right.READ,
    "verify": Right.CHANGE,  # it reads every resident byte: work that a reader may not cause
    "push": Right.CHANGE,
    "rollback": Right.CHANGE,
    "attach": Right.ATTACH,
}


@dataclass(frozen=True, slots=True)
class Caller:
    """A peer's credentials; `groups` holds all of its user's groups."""

    uid: int
    gid: int
    pid: int
    groups: frozenset[int]


@dataclass(frozen=True, slots=True)
class Group:
    """A group of the system."""

    gid: int
    name: str


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may change things, and who may take weights."""

    own_uid: int
    admins: Group | None = None
    inferds: Group | None = None  # may attach, and nothing else

    def check(self, verb: str, caller: Caller) -> None:
        """Raise NotPermitted unless the caller may use the verb."""
        right = RIGHTS[verb]
        if right is Right.READ or caller.uid in (0, self.own_uid):
            return
        groups = [group for group in (self.admins, self.inferds) if group is not None]
        if right is Right.CHANGE:
            groups = [group for group in groups if group is self.admins]
        if any(group.gid in (caller.gid, *caller.groups) for group in groups):
            return
        own = f", uid {self.own_uid}" if self.own_uid else ""
        allowed = f"root{own}" + "".join(f" and members of group {group.name}" for group in groups)
        raise NotPermitted(
            f"uid {caller.uid} may not {'roll back' if verb == 'rollback' else verb}; {allowed} may",
            verb=verb,
            uid=caller.uid,
            allowed=allowed,
        )


def parse_peer_address(address: str) -> tuple[int, int, int]:
    """`(uid, gid, pid)` from libzmq's `Peer-Address` of an ipc peer, `localhost:UID:GID:PID`.

    Raises ProtocolError for any other form: without credentials nothing is permitted.
    """
    parts = address.split(":")
    if len(parts) != 4 or parts[0] != "localhost" or not all(part.isdecimal() for part in parts[1:]):
        raise ProtocolError(f"peer address {address!r} carries no credentials")
    uid, gid, pid = (int(part) for part in parts[1:])
    return uid, gid, pid
