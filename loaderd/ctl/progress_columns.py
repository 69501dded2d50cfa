"""Columns of a progress bar that take their words as they are: nothing in them is read as markup."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.text import Text

from loaderd.ctl.text import printable


class Title(ProgressColumn):
    """The task's description."""

    def render(self, task: Task) -> Text:
        """One line, printable."""
        return Text(printable(task.description))


class Amount(ProgressColumn):
    """How much of how much: the task's field `amount`."""

    def render(self, task: Task) -> Text:
        """One line, printable."""
        return Text(printable(str(task.fields.get("amount", ""))))
