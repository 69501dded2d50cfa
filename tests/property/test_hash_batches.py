"""How resident bytes are shared out to threads that hash: every byte once, and put together again."""

from __future__ import annotations

import random
import zlib
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from shared._native import sha256_leaves
from shared.digest import LEAF_BYTES
from shared.memory.backend import Slab
from shared.resident import Part, Place, PlaceDigests, hash_batches


class Batching:
    """The one thing of a slab that matters here."""

    def __init__(self, batch_bytes: int) -> None:
        self.batch_bytes = batch_bytes


sizes = st.sampled_from(
    [1, 100, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES, 5 * LEAF_BYTES + 7]
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), sizes), max_size=12),
    st.lists(st.sampled_from([0, 1, LEAF_BYTES, 2 * LEAF_BYTES + 5, 1 << 30]), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
def test_parts_are_whole_leaves_and_come_together_in_any_order(
    drawn: list[tuple[int, int]], batch_bytes: list[int], chance: random.Random
) -> None:
    ends = [0, 0, 0]
    places: list[Place] = []
    for slab, nbytes in drawn:
        places.append((slab, ends[slab], nbytes))
        ends[slab] += nbytes
    slabs = {index: cast(Slab, Batching(each)) for index, each in enumerate(batch_bytes)}
    data = {place: random.Random(str(place)).randbytes(place[2]) for place in places}
    batches = hash_batches(places, slabs)
    parts: list[Part] = []
    for batch in batches:
        assert len({part.place[0] for part in batch}) == 1
        most = max(batch_bytes[batch[0].place[0]], LEAF_BYTES)
        assert sum(part.nbytes for part in batch) <= most
        assert all(part.start % LEAF_BYTES == 0 for part in batch)
        parts += batch
    assert sum(part.nbytes for part in parts) == sum(ends)
    chance.shuffle(parts)
    digests = PlaceDigests()
    found: dict[Place, tuple[int, bytes]] = {}
    for part in parts:
        piece = data[part.place][part.start : part.start + part.nbytes]
        whole = digests.add(part, zlib.crc32(piece), sha256_leaves(piece, LEAF_BYTES))
        if whole is not None:
            assert part.place not in found
            found[part.place] = whole
    assert found == {
        place: (zlib.crc32(bytes_), sha256_leaves(bytes_, LEAF_BYTES)) for place, bytes_ in data.items()
    }
