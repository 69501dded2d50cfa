"""Names and identities that cross process boundaries.

A *version* is named by people (`model-v7`) and identified by content (`sha256:…`).  Names are
checked here once, so that no other module has to wonder what a name may contain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType, Self

from shared.errors import InvalidName

Digest = NewType("Digest", str)
"""`sha256:` followed by 64 lower-case hex digits."""

Epoch = NewType("Epoch", int)
"""Fencing token of a commit; grows by one with each commit of a model, across restarts."""

Generation = NewType("Generation", str)
"""One life of loaderd (a UUID); a handle from another generation is stale."""

LeaseId = NewType("LeaseId", int)
"""One handoff connection within a generation."""

OperationId = NewType("OperationId", str)
"""One push or rollback; unique across restarts."""

SlabId = NewType("SlabId", str)
"""One physical allocation; unique across restarts of loaderd."""

DeviceId = NewType("DeviceId", str)
"""`host`, or the full UUID of a GPU (`GPU-…`); never an ordinal."""

HOST_DEVICE = DeviceId("host")

DIGEST_PATTERN = r"sha256:[0-9a-f]{64}"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
_DIGEST = re.compile(DIGEST_PATTERN)


def check_name(name: str, what: str) -> str:
    """Return `name` if it is safe as a path component and a metric label, else raise InvalidName."""
    if not _NAME.fullmatch(name):
        raise InvalidName(what=what, name=name)
    return name


def is_digest(text: str) -> bool:
    """Whether `text` is spelled as a Digest."""
    return _DIGEST.fullmatch(text) is not None


@dataclass(frozen=True, slots=True, order=True)
class VersionRef:
    """A version as people name it: model `smollm2`, version `v1`, folder `smollm2-v1`."""

    model: str
    version: str

    @classmethod
    def parse(cls, folder: str) -> Self:
        """Split `folder` at its last `-v`; raises InvalidName if there is none or a part is unsafe."""
        check_name(folder, "version")
        model, separator, number = folder.rpartition("-v")
        if not separator or not model or not number:
            raise InvalidName(what="version (expected MODEL-vN)", name=folder)
        return cls(check_name(model, "model"), "v" + number)

    @classmethod
    def of(cls, folder: str, model: str | None) -> Self:
        """Parse `folder`; with `model` given, the rest of the folder name after `model-` is the version."""
        if model is None:
            return cls.parse(folder)
        check_name(folder, "version")
        check_name(model, "model")
        prefix = model + "-"
        version = folder[len(prefix) :] if folder.startswith(prefix) else folder
        return cls(model, check_name(version, "version"))

    @property
    def folders(self) -> tuple[str, str]:
        """The folder names that `of` makes this version of."""
        return str(self), self.version

    def __str__(self) -> str:
        return f"{self.model}-{self.version}"


@dataclass(frozen=True, slots=True)
class VersionTag:
    """A version by name and by content; what responses carry in `x-model-version`."""

    ref: VersionRef
    digest: Digest

    def __str__(self) -> str:
        return f"{self.ref.version}@{self.digest}"
