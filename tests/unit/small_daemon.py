"""A daemon of a few lines in a process of its own, for tests of signals, exit codes and systemd."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path(__file__).parents[2]

_PROGRAM = """
import asyncio, os, signal, sys, time
from shared.errors import *
from shared.notify import Notifier
from shared.supervisor import Stop, Supervisor, die_with_parent, run_daemon

die_with_parent(int(sys.argv[1]))

def say(word):
    print(word, flush=True)

async def main(stop):
{body}

sys.exit(run_daemon(main))
"""


@contextmanager
def small_daemon(body: str, environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a process that runs `body` as the `main(stop)` of run_daemon; it never outlives the test."""
    program = _PROGRAM.format(body=textwrap.indent(textwrap.dedent(body), "    "))
    kept = {key: value for key, value in os.environ.items() if key not in ("NOTIFY_SOCKET", "JOURNAL_STREAM")}
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program, str(os.getpid())],
        cwd=_ROOT,
        env={**kept, **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def heard(process: subprocess.Popen[str]) -> str:
    """The next word the daemon says, empty if it has ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
