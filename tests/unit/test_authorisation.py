"""Who may do what."""

from __future__ import annotations

from typing import get_args

import pytest

from loaderd.authorisation import RIGHTS, Caller, Group, Policy, Right, parse_peer_address
from loaderd.peer_groups import configured_group
from shared import control
from shared.errors import ConfigError, NotPermitted, ProtocolError

POLICY = Policy(own_uid=990, admins=Group(991, "admins"), inferds=Group(992, "inferds"))
STRANGER = Caller(uid=1000, gid=1000, pid=7, groups=frozenset({1000, 27}))
READING = sorted(verb for verb, right in RIGHTS.items() if right is Right.READ)
CHANGING = sorted(verb for verb, right in RIGHTS.items() if right is Right.CHANGE)


def test_every_verb_has_a_right() -> None:
    union = get_args(control.Verb)[0]
    verbs = {get_args(model.model_fields["verb"].annotation)[0] for model in get_args(union)}
    assert verbs | {"attach"} == RIGHTS.keys()


def test_whatever_changes_something_needs_the_right_to() -> None:
    assert {"push", "rollback"} <= set(CHANGING)
    assert RIGHTS["attach"] is Right.ATTACH


@pytest.mark.parametrize("verb", READING)
def test_anyone_may_look(verb: str) -> None:
    POLICY.check(verb, STRANGER)


@pytest.mark.parametrize("verb", CHANGING)
@pytest.mark.parametrize(
    "caller",
    [
        Caller(0, 0, 1, frozenset()),
        Caller(990, 990, 1, frozenset()),
        Caller(1000, 991, 1, frozenset()),
        Caller(1000, 1000, 1, frozenset({991})),
    ],
    ids=["root", "own user", "primary group", "supplementary group"],
)
def test_these_may_change(verb: str, caller: Caller) -> None:
    POLICY.check(verb, caller)


@pytest.mark.parametrize("verb", CHANGING)
def test_others_may_not(verb: str) -> None:
    said = "roll back" if verb == "rollback" else verb
    with pytest.raises(NotPermitted, match=f"uid 1000 may not {said}; root, uid 990 and members of group"):
        POLICY.check(verb, STRANGER)
    with pytest.raises(NotPermitted):
        Policy(own_uid=990).check(verb, Caller(1000, 991, 1, frozenset({991})))


def test_an_inferd_may_attach_and_nothing_else() -> None:
    inferd = Caller(993, 992, 1, frozenset({992}))
    POLICY.check("attach", inferd)
    for verb in CHANGING:
        with pytest.raises(NotPermitted, match="members of group admins may"):
            POLICY.check(verb, inferd)
    with pytest.raises(NotPermitted, match="group admins and members of group inferds may"):
        POLICY.check("attach", STRANGER)


def test_a_peer_address_of_ipc() -> None:
    assert parse_peer_address("localhost:1000:1001:42") == (1000, 1001, 42)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost",
        "127.0.0.1:5555",
        "localhost:1:2",
        "localhost:a:b:c",
        "evil:0:0:1",
        "localhost:-1:0:1",
        "localhost:0:0:1:0",
        "localhost:²:0:1",
    ],
)
def test_any_other_address_permits_nothing(address: str) -> None:
    with pytest.raises(ProtocolError, match="carries no credentials"):
        parse_peer_address(address)


@pytest.mark.parametrize("name", ["", "no-such-group", "nul\0", "\ud800"])
def test_a_group_that_cannot_be_is_the_operators_to_mend(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^admin_group: group (.*) does not exist; .*: groupadd --system \1$"
    ):
        configured_group("admin_group", name)
