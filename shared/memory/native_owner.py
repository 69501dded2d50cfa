"""`NativeOwner`: a block in which one object of the extension is open."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar


class Closable(Protocol):
    """What is open until it is closed, once."""

    @property
    def is_open(self) -> bool:
        """Whether it was not closed yet."""
        ...

    def close(self) -> None:
        """Give up what it holds."""
        ...


Native = TypeVar("Native", bound=Closable)


class NativeOwner(Generic[Native]):
    """Owns one object of the extension; leaving the block closes it if it is still open."""

    __slots__ = ("_native",)

    def __init__(self, take_native: Native) -> None:
        self._native = take_native

    def close(self) -> None:
        """Raises InvariantError the second time."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._native.is_open:
            self.close()
