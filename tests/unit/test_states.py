"""Both state machines: the page shows the tables, every state can be reached, and bad steps tell a story."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from inferd.slot_states import SLOT_TABLE, SlotEvent, SlotState
from loaderd.lifecycle import ENDED, VERSION_TABLE, VersionEvent, VersionState
from shared.errors import InvariantError

PAGE = Path(__file__).parents[2] / "docs" / "states.md"


def _between(page: str, start: str) -> str:
    _, _, rest = page.partition(f"<!-- {start} -->\n")
    table, _, _ = rest.partition("<!-- end -->")
    return table


@pytest.mark.parametrize(
    ("heading", "rendered"),
    [("version table", VERSION_TABLE.render()), ("slot table", SLOT_TABLE.render())],
)
def test_the_page_shows_the_table_that_runs(heading: str, rendered: str) -> None:
    assert _between(PAGE.read_text(), heading) == rendered


def _reachable(start: str, steps: Iterable[tuple[str, str]]) -> set[str]:
    pairs = list(steps)
    found = {start}
    while True:
        more = {to for frm, to in pairs if frm in found} - found
        if not more:
            return found
        found |= more


def test_every_state_can_be_reached() -> None:
    versions = ((frm, to) for (frm, _), to in VERSION_TABLE.steps.items())
    assert _reachable(VersionState.REQUESTED, versions) == set(VersionState)
    slots = ((frm, to) for (frm, _), to in SLOT_TABLE.steps.items())
    assert _reachable(SlotState.EMPTY, slots) == set(SlotState)


def test_every_event_is_used() -> None:
    assert {event for _, event in VERSION_TABLE.steps} == set(VersionEvent)
    assert {event for _, event in SLOT_TABLE.steps} == set(SlotEvent)


def test_nothing_follows_an_end() -> None:
    assert not {frm for frm, _ in VERSION_TABLE.steps} & ENDED


def test_what_serves_cannot_fail_or_be_freed() -> None:
    """Whatever goes wrong elsewhere, the active version only ever becomes the retained one."""
    assert {event for frm, event in VERSION_TABLE.steps if frm is VersionState.ACTIVE} == {
        VersionEvent.RETAIN
    }


def test_a_wrong_step_tells_the_story() -> None:
    life = VERSION_TABLE.begin().advance(VersionEvent.PLAN, "hot").advance(VersionEvent.LOAD, "reading")
    with pytest.raises(InvariantError, match="a version that is loading cannot commit") as caught:
        life.advance(VersionEvent.COMMIT, "epoch 3")
    assert caught.value.story[-2:] == (
        "requested --plan--> planned: hot",
        "planned --load--> loading: reading",
    )


def test_a_slot_is_refilled_only_when_empty() -> None:
    filled = [frm for (frm, event), _ in SLOT_TABLE.steps.items() if event is SlotEvent.MAP]
    assert filled == [SlotState.EMPTY]
    life = SLOT_TABLE.begin().advance(SlotEvent.MAP, "v1")
    with pytest.raises(InvariantError, match="a slot that is mapping cannot commit"):
        life.advance(SlotEvent.COMMIT, "early")


def test_the_story_does_not_grow_for_ever() -> None:
    life = SLOT_TABLE.begin()
    steps = [SlotEvent.MAP, SlotEvent.MAPPED, SlotEvent.WARMED, SlotEvent.DRAIN, SlotEvent.RELEASE]
    for _ in range(20):
        for step in steps:
            life = life.advance(step, "again")
    assert len(life.story) == 32
