"""Memory that survived a restart: taken back from an inferd that still maps it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from loaderd.checkpoint.checkpoint import parse_config
from loaderd.checkpoint.names import CONFIG_FILE
from loaderd.leases import Lease
from loaderd.slab_table import SlabTable, UserId
from shared.errors import CheckpointError, DigestMismatch, ProtocolError
from shared.gate import Pacer
from shared.ids import VersionTag
from shared.memory.backend import MemoryBackend, Slab
from shared.resident import ResidentVersion, check_identity

HAND_BACK_WITHIN_S = 10.0


async def take_back(
    lease: Lease, tag: VersionTag, backend: MemoryBackend, slabs: SlabTable, user: UserId, pacer: Pacer
) -> ResidentVersion:
    """Receive, map and verify a version that an inferd holds; its slabs go to the table.

    Every byte is hashed against the tag, which comes from the journal or is what is found to serve.
    All of it must be on the inferd's device.  A slab that two versions share is mapped once.  Raises
    ProtocolError, DigestMismatch, PeerGone.
    """
    incoming = await lease.hand_back(tag, HAND_BACK_WITHIN_S)
    mapped = await asyncio.to_thread(incoming.map, backend)
    own: list[Slab] = []
    try:
        for entry in mapped.layout.slabs:
            if entry.device != lease.device:
                raise ProtocolError(
                    f"{lease.name} is on {lease.device} and handed back a slab of {entry.device}"
                )
        for slab in mapped.slabs:
            if slab.entry.slab_id in slabs:
                known = slabs.share(slab.entry.slab_id, user)
                if known.entry != slab.entry:
                    raise ProtocolError(f"slab {slab.entry.slab_id} was handed back as another: {slab.entry}")
                own.append(known)
                slab.close()
            else:
                slabs.add(slab, user)
                own.append(slab)
    except BaseException:
        for slab in mapped.slabs[len(own) :]:
            slab.close()
        raise
    version = replace(mapped, slabs=tuple(own))
    try:
        await asyncio.to_thread(check_identity, version, hash_bytes=True, pacer=pacer)
    except DigestMismatch as error:
        places = [
            (version.layout.slabs[tensor.slab].slab_id, tensor.offset_bytes)
            for tensor in version.layout.tensors
            if tensor.name == error.facts.get("tensor")
        ]
        if places:
            await lease.tell_damage(places)  # it serves on with it, and must not say that it is ready
        raise
    return version


def read_config(assets: Mapping[str, bytes]) -> dict[str, object]:
    """config.json of an adopted version; raises CheckpointError if it is none."""
    if CONFIG_FILE not in assets:
        raise CheckpointError("is missing", file=CONFIG_FILE)
    return parse_config(assets[CONFIG_FILE])
