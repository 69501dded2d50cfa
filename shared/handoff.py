"""What travels on `handoff.sock` between loaderd and an inferd.

The connection is the lease.  inferd opens it with `Hello`; after `Welcome` loaderd asks and inferd
answers with the same `request_id`, and inferd reports on its own when its slots change.
Fds accompany `Prepare` (layout table, assets), `SlabBatch` and `HandedBack`, in the order named there.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from shared.control import SlotReport
from shared.layout_table import MAX_SLABS
from shared.messages import Count, InFlight, Name, Seconds, Tag, WireError, WireModel

FDS_PER_FRAME = 128
"""Well below the kernel's SCM_MAX_FD of 253."""

SLOTS = 2
"""An inferd's slots: no more can be held or reported."""

DAMAGED_PLACES = 200
"""Damaged places told at once; more change nothing about what is to be done."""

SlabCount = Annotated[int, Field(ge=0, le=MAX_SLABS)]


class SlabHandle(WireModel):
    """A slab whose fd travels at the same position of the same frame."""

    slab_id: Name
    device: str
    nbytes: Count


class HeldVersion(WireModel):
    """A version that inferd maps at the time it attaches."""

    tag: Tag
    slot: Annotated[int, Field(ge=0, lt=SLOTS)]
    state: str
    epoch: Count


# --- inferd → loaderd ----------------------------------------------------------------------------


class Hello(WireModel):
    """First frame of a connection: who attaches, for which model, and what it already holds."""

    kind: Literal["hello"] = "hello"
    protocol: int
    name: Name
    model: Name
    backend: str
    device: str  # where it maps weights and computes
    engine: str
    flip: str
    serves_two_versions: bool
    epoch: Count  # newest epoch this inferd has committed, 0 if none
    held: Annotated[tuple[HeldVersion, ...], Field(max_length=SLOTS)] = ()


class Prepared(WireModel):
    """Mapped, checked, built and warm; `tag` carries the digest of what is mapped."""

    kind: Literal["prepared"] = "prepared"
    request_id: Count
    tag: Tag
    map_s: Seconds
    verify_s: Seconds
    build_s: Seconds
    warm_s: Seconds


class Committed(WireModel):
    """`tag` serves under `epoch`; `flip_ns` from the commit's arrival to the flip, `requests_turned` how
    many running requests the policy moved or ended."""

    kind: Literal["committed"] = "committed"
    request_id: Count
    tag: Tag
    epoch: Count
    flip_ns: Count
    requests_turned: Annotated[int, Field(ge=0, lt=1 << 32)] = 0  # added up over all inferds


class Released(WireModel):
    """Nothing of `tag` is mapped any more."""

    kind: Literal["released"] = "released"
    request_id: Count
    tag: Tag


class HandedBack(WireModel):
    """First frame of a held version's return; fds: layout table, assets.  `SlabBatch` frames follow."""

    kind: Literal["handed_back"] = "handed_back"
    request_id: Count
    tag: Tag
    slabs: SlabCount


class Failed(WireModel):
    """The request with this id was not carried out; inferd is as it was before it."""

    kind: Literal["failed"] = "failed"
    request_id: Count
    error: WireError


class Report(WireModel):
    """Unasked: the slots after a change, and the load about once a second, or as often as `Pace` says.

    The last four count up from the start of inferd.
    """

    kind: Literal["report"] = "report"
    epoch: Count
    slots: Annotated[tuple[SlotReport, ...], Field(max_length=SLOTS)]
    running: Count
    waiting: Count
    tokens_generated: Count
    decode_steps: Count = 0  # steps right after another that only gave sequences their next token
    decode_ns: Count = 0  # these steps took together: over decode_steps, the time between two tokens
    hashed_bytes: Count = 0  # as mapped here


# --- loaderd → inferd ----------------------------------------------------------------------------


class Welcome(WireModel):
    """The lease is open."""

    kind: Literal["welcome"] = "welcome"
    protocol: int
    generation: str
    lease: Count


class Refused(WireModel):
    """The lease is not granted; the connection ends."""

    kind: Literal["refused"] = "refused"
    error: WireError


class Prepare(WireModel):
    """Map, check, build and warm `tag`, waiting at most `timeout_s` for the slot it needs to drain;
    fds: layout table, assets.  `SlabBatch` frames follow."""

    kind: Literal["prepare"] = "prepare"
    request_id: Count
    tag: Tag
    slabs: SlabCount
    timeout_s: Seconds


class Commit(WireModel):
    """Flip to `tag`, which is prepared or retained; refused unless `epoch` is newer than the last."""

    kind: Literal["commit"] = "commit"
    request_id: Count
    tag: Tag
    epoch: Count
    in_flight: InFlight = "finish"


class Announce(WireModel):
    """The very `Commit` that may come next, said ahead while the decision goes to disk.

    Nothing changes and nothing is answered.  inferd keeps the order's frame, so that when it comes it is
    recognised by its bytes instead of being decoded and validated: that is most of a flip's time.
    """

    kind: Literal["announce"] = "announce"
    order: Commit


class Release(WireModel):
    """Drain and unmap `tag`, which does not serve."""

    kind: Literal["release"] = "release"
    request_id: Count
    tag: Tag
    timeout_s: Seconds


class Pace(WireModel):
    """How often to report from now on, and how fast to hash what is mapped: as fast as it goes where
    `bytes_per_s` is None, not at all where it is 0.  Holds until the next one or the end of the lease; not
    answered."""

    kind: Literal["pace"] = "pace"
    report_every_s: Annotated[float, Field(ge=0.01, le=60)]
    bytes_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class DamagedPlace(WireModel):
    """Where a slab's bytes are no longer those that were verified."""

    slab_id: Name
    offset_bytes: Count  # of a tensor


class Damaged(WireModel):
    """What was found damaged, in slabs that inferd may map or not; not answered.  inferd goes on serving
    and says that it is not ready."""

    kind: Literal["damaged"] = "damaged"
    places: Annotated[tuple[DamagedPlace, ...], Field(min_length=1, max_length=DAMAGED_PLACES)]


class HandBack(WireModel):
    """Send the fds of held version `tag`, so that a restarted loaderd can adopt its memory."""

    kind: Literal["hand_back"] = "hand_back"
    request_id: Count
    tag: Tag


# --- both ways -----------------------------------------------------------------------------------


class SlabBatch(WireModel):
    """Up to FDS_PER_FRAME slabs of the transfer `request_id`; one fd per slab, in order."""

    kind: Literal["slab_batch"] = "slab_batch"
    request_id: Count
    first: Count
    slabs: Annotated[tuple[SlabHandle, ...], Field(min_length=1, max_length=FDS_PER_FRAME)]


FromInferd = Annotated[
    Hello | Prepared | Committed | Released | HandedBack | SlabBatch | Failed | Report,
    Field(discriminator="kind"),
]
FromLoaderd = Annotated[
    Welcome | Refused | Prepare | SlabBatch | Announce | Commit | Release | HandBack | Pace | Damaged,
    Field(discriminator="kind"),
]

FROM_INFERD: TypeAdapter[FromInferd] = TypeAdapter(FromInferd)
FROM_LOADERD: TypeAdapter[FromLoaderd] = TypeAdapter(FromLoaderd)
