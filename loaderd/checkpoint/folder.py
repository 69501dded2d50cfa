"""A checkpoint folder below a model root: opened without letting any symlink lead out.

Symlinks are resolved here, component by component, over a chain of directory fds that starts at
the root: `..` steps back along the chain and never above it.  So the hub's layout (a snapshot whose
files point to `../../blobs`) works, and no rename under way can make a path leave the root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import Self

from loaderd.checkpoint.names import shown as displayed
from shared.closing import Closing
from shared.errors import CheckpointError, DriverError, InvariantError

TREE_LIMIT = 65_536
"""Files and folders that a tree may have."""

_MAX_DEPTH = 32
_MAX_LINKS = 40
_OPEN_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CALLERS_FAULT = {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG}


class Folder(Closing):
    """An open folder.  Owns the directory fds from the root down to it."""

    def __init__(self, root: Path, name: str, chain: list[int]) -> None:
        self._root = root
        self.name = name
        self._chain = chain

    @classmethod
    def open(cls, root: Path, relative: str) -> Self:
        """Open the folder `relative` below `root`; raises CheckpointError if it is missing, is no
        folder, or lies outside the root."""
        real_root = Path(os.path.realpath(root))
        with _translated(relative):
            chain = [os.open(real_root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)]
        folder = cls(real_root, PurePosixPath(relative).name, chain)
        with ExitStack() as undo, _translated(relative):
            undo.push(folder)
            if folder._walk(chain, relative, shown=relative) is not None:
                raise CheckpointError("is not a folder", file=relative)
            undo.pop_all()
        return folder

    @classmethod
    def anywhere(cls, directory: Path) -> Self:
        """Open any directory, with the caller's own rights; for command-line tools.  Raises as `open`."""
        return cls.open(Path("/"), os.path.realpath(directory).lstrip("/"))

    @property
    def root(self) -> Path:
        """The root, with symlinks on the way to it resolved."""
        return self._root

    def borrow_fd(self) -> int:
        """The folder's own fd (O_PATH), for calls that take a directory fd."""
        if not self._chain:
            raise InvariantError(f"folder {self.name!r} is closed")
        return self._chain[-1]

    def names(self) -> frozenset[str]:
        """Names in the folder now.  Blocking."""
        with _translated("."):
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.borrow_fd())
            try:
                return frozenset(os.listdir(fd))  # noqa: PTH208 - by fd, not by path
            finally:
                os.close(fd)

    def open_file(self, name: str) -> int:
        """Open a regular file for reading; the caller owns the fd.

        `name` is a plain file name, the file may be a symlink that stays below the root.  Raises
        CheckpointError if it is missing, not a regular file, or leads out.  Never waits for a pipe.
        """
        if "/" in name or name in {"", ".", ".."} or "\0" in name:
            raise CheckpointError("is not a plain file name", file=name)
        return self.open_below(name)

    def open_below(self, path: str) -> int:
        """Open the regular file at `path`, which may pass through folders, as `open_file` does."""
        shown = displayed(path)
        with _translated(shown), self._copied_chain() as chain:
            leaf = self._walk(chain, path, shown=shown)
            if leaf is None:
                raise CheckpointError("is a folder, expected a file", file=shown)
            fd = os.open(leaf, _OPEN_FILE, dir_fd=chain[-1])
        # Checked on the fd: the name may have been given to something else since the walk saw it.
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise CheckpointError("is not a regular file", file=shown)
        return fd

    def tree(self, is_ignored: Callable[[str], bool]) -> dict[str, bool]:
        """Every file below the folder by relative path, and whether it is a symlink.  Blocking.

        Folders are entered, but none through a symlink; what is ignored is neither entered nor
        looked at.  Raises CheckpointError for a name that is not UTF-8, for what is neither file nor
        folder nor a symlink to a file, and for a tree out of bounds.
        """
        files: dict[str, bool] = {}
        pending = [""]
        while pending:
            below = pending.pop()
            for name, mode in self._entries(below):
                path = below + name
                if is_ignored(path):
                    continue
                if not _is_unicode(name):
                    raise CheckpointError("has a name that is not UTF-8", file=displayed(path))
                if len(files) + len(pending) >= TREE_LIMIT:
                    raise CheckpointError(f"holds more than {TREE_LIMIT} files", file=self.name)
                if stat.S_ISDIR(mode):
                    if path.count("/") >= _MAX_DEPTH:
                        raise CheckpointError(
                            f"lies more than {_MAX_DEPTH} folders deep", file=displayed(path)
                        )
                    pending.append(path + "/")
                    continue
                files[path] = stat.S_ISLNK(mode)
                if not stat.S_ISREG(mode):
                    os.close(self.open_below(path))  # says what is wrong with it
        return files

    def _entries(self, below: str) -> list[tuple[str, int]]:
        """Names and modes in the folder at `below`, which is empty or ends in a slash."""
        with _translated(displayed(below)), self._copied_chain() as chain:
            if self._walk(chain, below, shown=displayed(below)) is not None:
                raise CheckpointError("is no longer a folder", file=displayed(below))
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=chain[-1])
            try:
                with os.scandir(fd) as entries:
                    found = [(entry.name, entry.stat(follow_symlinks=False).st_mode) for entry in entries]
                return sorted(found)
            finally:
                os.close(fd)

    @contextmanager
    def _copied_chain(self) -> Iterator[list[int]]:
        """The chain, for a walk to extend; all of it is closed at the end."""
        chain: list[int] = []
        try:
            chain.extend(os.dup(fd) for fd in self._chain)
            yield chain
        finally:
            for link in chain:
                os.close(link)

    def close(self) -> None:
        """Close the directory fds; closing again does nothing."""
        while self._chain:
            os.close(self._chain.pop())

    def _walk(self, chain: list[int], path: str, *, shown: str) -> str | None:
        """Extend `chain` along `path`; return the last component if it is not a directory."""
        pending = deque(path.split("/"))
        links = 0
        if path.startswith("/"):
            raise CheckpointError("is an absolute path", file=shown)
        while pending:
            part = pending.popleft()
            if part in {"", "."}:
                continue
            if part == "..":
                if len(chain) == 1:
                    raise CheckpointError(f"leads out of the model root {self._root}", file=shown)
                os.close(chain.pop())
                continue
            mode = os.stat(part, dir_fd=chain[-1], follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                links += 1
                if links > _MAX_LINKS:
                    raise CheckpointError(f"passes more than {_MAX_LINKS} symlinks", file=shown)
                target = os.readlink(part, dir_fd=chain[-1])
                pending.extendleft(reversed(self._follow(chain, target, shown)))
            elif stat.S_ISDIR(mode):
                chain.append(os.open(part, _OPEN_DIRECTORY, dir_fd=chain[-1]))
            elif not stat.S_ISREG(mode):
                raise CheckpointError("is not a regular file", file=shown)
            elif pending:
                raise CheckpointError(f"passes through {part!r}, which is not a folder", file=shown)
            else:
                return part
        return None

    def _follow(self, chain: list[int], target: str, shown: str) -> list[str]:
        """Components of a symlink's target; an absolute one starts again at the root it must lie in."""
        if not target.startswith("/"):
            return target.split("/")
        try:
            inside = PurePosixPath(target).relative_to(self._root)
        except ValueError:
            raise CheckpointError(
                f"is a symlink to {target}, which leads out of the model root {self._root}", file=shown
            ) from None
        while len(chain) > 1:
            os.close(chain.pop())
        return list(inside.parts)


def _is_unicode(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def _translated(shown: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError where the folder is at fault, else into a DriverError."""
    try:
        yield
    except OSError as error:
        if error.errno in _CALLERS_FAULT:
            raise CheckpointError(f"cannot be opened: {error.strerror}", file=shown) from error
        raise DriverError("open", error.errno or 0, f"{shown}: {error.strerror}") from error
