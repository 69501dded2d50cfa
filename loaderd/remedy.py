"""What to do about a checkpoint folder that is not what its seal or signature says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import CheckpointError, SignatureRefused

SEAL_IT = "; if the folder is as it should be, seal it: `loaderctl seal DIR`; else copy it again"
SIGN_IT = "; if the folder is as it should be, sign it: `loaderctl seal DIR --key KEY`; else copy it again"


@contextmanager
def remedied(step: str = "", *, folder: str = "") -> Iterator[None]:
    """Have what is wrong with a checkpoint end in `step`: what to do about it; and name `folder`, if it is
    given, beside the file.  What a signature refuses has a step of its own."""
    try:
        yield
    except CheckpointError as error:
        place = error.file if folder in ("", error.file) else f"{folder}/{error.file}"
        step = SIGN_IT if isinstance(error, SignatureRefused) else step
        raise type(error)(error.reason + step, file=place, tensor=error.tensor, byte=error.byte) from error
