"""Text from a daemon or a file is shown as text: no escape sequence, markup or line break works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from tests.unit.ctl import reports
from tests.unit.ctl.command_line import OnTerminal, environment, run
from tests.unit.ctl.scripted_daemon import ScriptedDaemon

HOSTILE = "[red]x[/red] [link=http://e] \x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202e\u200b:smile: [/]"
SHOWN = r"[red]x[/red] [link=http://e] \x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202e\u200b:smile: [/]"

# Sequences that loaderctl itself sends: colours, the cursor, erasing a line, the other screen.
_OWN = re.compile(r"\x1b\[[0-9;]*m|\x1b\[\?(25|1049)[hl]|\x1b\[2K|\x1b\[1A|\x1b\[H")


def assert_clean(text: str) -> None:
    """Nothing but printable characters, line ends and what loaderctl sends itself."""
    left = _OWN.sub("", text).replace("\r", "").replace("\n", "")
    assert left.isprintable(), [char for char in left if not char.isprintable()]


def hostile_daemon(run_dir: Path) -> ScriptedDaemon:
    daemon = ScriptedDaemon(run_dir)
    daemon.on("push", reports.push_reply(warnings=(HOSTILE,), reasons=(HOSTILE,), name=HOSTILE))
    failed = reports.ended("failed", error=reports.wire_error("x", HOSTILE), warnings=(HOSTILE,))
    daemon.play([reports.operation(), failed])
    status = reports.status()
    versions = tuple(
        version.model_copy(
            update={
                "state": HOSTILE,
                "holders": tuple(
                    holder.model_copy(update={"inferd": HOSTILE, "state": HOSTILE})
                    for holder in version.holders
                ),
            }
        )
        for version in status.versions
    )
    inferds = tuple(
        inferd.model_copy(
            update={"slots": tuple(slot.model_copy(update={"state": HOSTILE}) for slot in inferd.slots)}
        )
        for inferd in status.inferds
    )
    memory = tuple(entry.model_copy(update={"device": HOSTILE}) for entry in status.memory)
    daemon.on(
        "status",
        reports.status(
            generation=HOSTILE, backend=HOSTILE, versions=versions, inferds=inferds, memory=memory
        ),
    )
    entries = tuple(
        entry.model_copy(
            update={"kind": HOSTILE, "cause": HOSTILE, "model": HOSTILE, "data": {HOSTILE: HOSTILE}}
        )
        for entry in reports.history().entries
    )
    daemon.on("history", reports.history().model_copy(update={"entries": entries}))
    names = (HOSTILE,)
    daemon.on(
        "diff",
        reports.difference().model_copy(
            update={"before": HOSTILE, "changed": names, "added": names, "files_changed": names}
        ),
    )
    daemon.on("verify", reports.verification(damaged=names))
    folders = tuple(
        folder.model_copy(update={"name": HOSTILE, "root": HOSTILE})
        for folder in reports.versions_report().folders
    )
    daemon.on("versions", reports.versions_report().model_copy(update={"folders": folders}))
    daemon.on("rollback", InvalidRequest(HOSTILE))
    return daemon


@pytest.mark.parametrize(
    "arguments",
    [
        ("push", "v2"),
        ("push", "v2", "--dry-run"),
        ("status",),
        ("history",),
        ("diff", "a", "b"),
        ("verify", "v2"),
        ("versions",),
        ("rollback",),
    ],
)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_text_from_outside_is_interpreted(
    tmp_path: Path, arguments: tuple[str, ...], is_terminal: bool
) -> None:
    with hostile_daemon(tmp_path):
        ran = OnTerminal.spawn(tmp_path, *arguments).finish() if is_terminal else run(tmp_path, *arguments)
    for output in (ran.stdout, ran.stderr):
        assert_clean(output)
    everything = _OWN.sub("", ran.stdout + ran.stderr)
    if is_terminal:  # tables fold their cells
        assert "[red]x" in everything
        assert r"\x1b]0" in everything
    else:
        # An error may have several lines, which are indented.
        assert SHOWN in everything.replace("\n  ", r"\n")


def test_a_name_on_the_command_line_is_not_echoed_raw(tmp_path: Path) -> None:
    ran = run(tmp_path, "push", "\x1b[2Jv2")
    assert ran.code == 2
    assert_clean(ran.stderr)


def test_a_locale_without_the_characters_does_not_stop_the_show(tmp_path: Path) -> None:
    env = environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
    with ScriptedDaemon(tmp_path) as daemon:
        daemon.on("push", reports.push_reply()).play(reports.a_whole_push())
        ran = run(tmp_path, "push", "smollm2-v2", env=env)
    assert (ran.code, ran.stderr) == (0, "")
    assert r"18.4 \xb5s" in ran.stdout
