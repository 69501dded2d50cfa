"""`Closing`: what is closed at the end of the block that it was opened for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Owns something until it is closed; leaving the block closes it."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Give up what it owns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
