"""Frames: what is refused before it can do harm, and that everything typed survives the wire."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import control, handoff
from shared.codec import CONTROL_FRAME_BYTES, HANDOFF_FRAME_BYTES, PROTOCOL_VERSION, decode, encode
from shared.control import EVENT, REPLY, REQUEST, Push, Reply, Request, StatusReport
from shared.errors import (
    ChangeoverError,
    CheckpointError,
    DigestMismatch,
    DriverError,
    InvariantError,
    OutOfMemory,
    ProtocolError,
    SlotBusy,
    error_class,
)
from shared.handoff import FDS_PER_FRAME, FROM_INFERD, FROM_LOADERD, SlabBatch, SlabHandle
from shared.messages import WireError

GOOD = Request(protocol=PROTOCOL_VERSION, request_id="r1", deadline_ns=5, body=Push(name="toy-v1"))


def _packed(**changes: object) -> bytes:
    value = GOOD.model_dump() | changes
    return bytes(msgpack.packb(value))


def test_a_request_survives_the_wire() -> None:
    assert decode(encode(GOOD, CONTROL_FRAME_BYTES), REQUEST, CONTROL_FRAME_BYTES) == GOOD


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (_packed()[:-1], "not msgpack"),
        (_packed() + b"\x00", "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),  # an array that claims four billion items
        (b"\xdb\xff\xff\xff\xff", "not msgpack"),  # a string that claims four gigabytes
        (b"\xc7\x01\x05x", "not msgpack"),  # an extension type
        (b"\x91" * 2000, "not msgpack"),  # nested without end
        (bytes(msgpack.packb({1: 2})), "not msgpack"),  # keys are text
        (bytes(msgpack.packb([1, 2])), "top level"),
        (_packed(extra=1), "refused at extra"),
        (_packed(deadline_ns="5"), "refused at deadline_ns"),
        (_packed(deadline_ns=-1), "refused at deadline_ns"),
        (_packed(deadline_ns=True), "refused at deadline_ns"),
        (_packed(request_id="x" * 65), "refused at request_id"),
        (_packed(body={"verb": "format_disk"}), "refused at body"),
        (_packed(body={"verb": "push", "name": "../etc"}), "refused at body.push.name"),
        (_packed(body={"verb": "push", "name": "a/b"}), "refused at body.push.name"),
        (_packed(body={"verb": "push", "name": "toy-v1", "force": True}), "refused at body.push.force"),
        (_packed(body={"verb": "push", "name": "toy-v1", "dry_run": 1}), "refused at body.push.dry_run"),
    ],
)
def test_what_is_refused(frame: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode(frame, REQUEST, CONTROL_FRAME_BYTES)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused_and_nothing_else_happens(frame: bytes) -> None:
    for adapter in (REQUEST, REPLY, EVENT, FROM_INFERD, FROM_LOADERD):
        with pytest.raises(ProtocolError):
            decode(frame, adapter, HANDOFF_FRAME_BYTES)


def test_frames_are_capped_on_both_ends() -> None:
    large = GOOD.model_copy(update={"request_id": "x" * 1000})
    with pytest.raises(ProtocolError, match="exceeds the frame cap of 500"):
        encode(large, 500)
    with pytest.raises(ProtocolError, match="exceeds the cap of 10"):
        decode(encode(GOOD, CONTROL_FRAME_BYTES), REQUEST, 10)


@pytest.mark.parametrize("has_both", [False, True])
def test_a_reply_is_a_result_or_an_error(has_both: bool) -> None:
    result = control.HistoryReport(entries=()).model_dump() if has_both else None
    error = {"code": "x", "message": "y", "facts": {}} if has_both else None
    frame = msgpack.packb({"protocol": 1, "request_id": "a", "result": result, "error": error})
    with pytest.raises(ProtocolError, match="a result or an error"):
        decode(frame, REPLY, CONTROL_FRAME_BYTES)


def test_a_full_batch_of_slabs_fits_a_frame() -> None:
    handle = SlabHandle(slab_id="f" * 127, device="GPU-" + "0" * 36, nbytes=(1 << 63) - 1)
    batch = SlabBatch(request_id=(1 << 63) - 1, first=0, slabs=(handle,) * FDS_PER_FRAME)
    assert decode(encode(batch, HANDOFF_FRAME_BYTES), FROM_INFERD, HANDOFF_FRAME_BYTES) == batch
    with pytest.raises(ValueError, match="at most"):
        SlabBatch(request_id=1, first=0, slabs=(handle,) * (FDS_PER_FRAME + 1))


def test_every_message_kind_is_its_own() -> None:
    for adapter, kinds in ((FROM_INFERD, 8), (FROM_LOADERD, 10)):
        schema = adapter.json_schema()
        assert len(schema["discriminator"]["mapping"]) == kinds
    assert handoff.Hello.model_config["extra"] == "forbid"


def test_a_status_of_many_versions_fits_a_frame() -> None:
    tag = {"model": "m" * 100, "version": "v" * 20, "digest": "sha256:" + "0" * 64}
    version = {
        "tag": tag,
        "state": "draining",
        "since_ns": 1 << 60,
        "devices": ("GPU-" + "0" * 36,) * 8,
        "nbytes": 1 << 40,
        "shared_bytes": 0,
        "tensors": 10**6,
        "verified": "sealed",
        "epoch": 1 << 40,
        "holders": (),
    }
    status = {
        "generation": "g",
        "pid": 1,
        "uptime_s": 1.0,
        "backend": "host",
        "memory": (),
        "models": (),
        "versions": (version,) * 1000,
        "inferds": (),
    }
    reply = Reply(protocol=1, request_id="a", result=StatusReport.model_validate(status))
    assert decode(encode(reply, CONTROL_FRAME_BYTES), REPLY, CONTROL_FRAME_BYTES) == reply


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("bad frame", size_bytes=3),
        OutOfMemory(what="a slab", needed_bytes=10, free_bytes=2),
        DriverError("mmap", 12, "Cannot allocate memory"),
        CheckpointError("is cut", file="model.safetensors", tensor="w", byte=7),
        DigestMismatch("leaf 3 differs", file="model.safetensors", tensor="w", byte=9),
        SlotBusy("slot 1 holds v1", references=2, slot=1),
        InvariantError("impossible", ("first", "second")),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_class_message_and_facts(error: ChangeoverError) -> None:
    wire = WireError.model_validate(WireError.of(error).model_dump())
    rebuilt = wire.to_error()
    assert type(rebuilt) is type(error)
    assert (rebuilt.message, rebuilt.facts) == (error.message, error.facts)
    assert str(rebuilt) == error.message
    for attribute in ("file", "tensor", "byte", "reason", "call", "number", "story"):
        if hasattr(error, attribute):
            assert hasattr(rebuilt, attribute), attribute


def test_codes_are_unique_and_unknown_ones_are_the_root() -> None:
    classes: list[type[ChangeoverError]] = [ChangeoverError]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    codes = [cls.code for cls in classes if "code" in cls.__dict__]
    assert len(codes) == len(set(codes))
    assert error_class("from the future") is ChangeoverError
