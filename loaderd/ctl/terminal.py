"""Where loaderctl writes: data to stdout, remarks and errors to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.text import Text

from loaderd.ctl.text import printable, printable_lines

_PIPED_COLUMNS = 500  # tables are as wide as their cells need, not folded for a screen nobody looks at


class OutputClosedError(Exception):
    """The reader of stdout or stderr went away; there is nobody left to tell."""


class _PipeConsole(Console):
    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise OutputClosedError


def _console(stream: TextIO, *, is_plain: bool) -> Console:
    # Markup, emoji and highlighting would interpret text that comes from files and daemons.
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPED_COLUMNS
    return _PipeConsole(
        file=stream,
        markup=False,
        emoji=False,
        highlight=False,
        no_color=True if is_plain else None,  # None: as NO_COLOR says
        width=width,
    )


class Terminal:
    """Both output streams of one run.  Methods raise OutputClosedError once a reader is gone."""

    def __init__(self, *, is_plain: bool = False) -> None:
        self.out = _console(sys.stdout, is_plain=is_plain)
        self.err = _console(sys.stderr, is_plain=is_plain)
        self.is_json = False

    @property
    def is_interactive(self) -> bool:
        """Whether stdout can show a live display."""
        return self.out.is_terminal and not self.out.is_dumb_terminal and not self.is_json

    def line(self, text: str, style: str = "") -> None:
        """One line of data on stdout, not wrapped; characters that are not printable are escaped."""
        self.out.print(Text(printable(text), style=style), soft_wrap=True)

    def show(self, renderable: RenderableType) -> None:
        """A table or group on stdout; the caller has made its text printable."""
        if self.out.is_terminal:
            self.out.print(renderable)
            return
        with self.out.capture() as capture:
            self.out.print(renderable)
        # Tables pad their last column, which only gets in the way of whoever reads a file.
        self._write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))

    def remark(self, text: str, style: str = "") -> None:
        """One line on stderr for the person who watches."""
        self.err.print(Text(printable(text), style=style), soft_wrap=True)

    def error(self, message: str) -> None:
        """An error on stderr, one line per line of `message`; all but the first are indented, so that
        none can pass for another error."""
        first, *rest = printable_lines(message)
        self.err.print(Text.assemble(("error: ", "bold red"), first), soft_wrap=True)
        for line in rest:
            self.err.print(Text("  " + line.lstrip()), soft_wrap=True)

    def json(self, value: Mapping[str, object]) -> None:
        """One JSON object on one line of stdout, in ASCII, flushed."""
        self._write(json.dumps(value, allow_nan=False, separators=(",", ":")) + "\n")

    def _write(self, text: str) -> None:
        try:
            self.out.file.write(text)
            self.out.file.flush()
        except BrokenPipeError as error:
            raise OutputClosedError from error

    def discard(self) -> None:
        """Point both streams at /dev/null, so that the interpreter's last flush finds no closed pipe."""
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(null, stream.fileno())
        finally:
            os.close(null)
