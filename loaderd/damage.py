"""Damage: places in slabs whose bytes are no longer those that were verified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.ids import SlabId
from shared.layout import Layout


class Damage:
    """What was found damaged since start.  Slab ids are never used again, so nothing has to be taken back:
    damage is gone when nobody uses its slab any more."""

    def __init__(self) -> None:
        self._offsets: dict[SlabId, set[int]] = {}

    def __contains__(self, slab_id: object) -> bool:
        """Whether anything in a slab is damaged."""
        return slab_id in self._offsets

    def note(self, layout: Layout, names: Sequence[str]) -> bool:
        """Remember that these tensors are damaged where the layout says; whether that is news."""
        damaged = frozenset(names)
        is_news = False
        for tensor in layout.tensors:
            if tensor.name in damaged:
                offsets = self._offsets.setdefault(layout.slabs[tensor.slab].slab_id, set())
                is_news |= tensor.offset_bytes not in offsets
                offsets.add(tensor.offset_bytes)
        return is_news

    def names(self, layout: Layout) -> tuple[str, ...]:
        """Damaged tensors of a layout, also where another version's were found to be."""
        if not any(slab.slab_id in self._offsets for slab in layout.slabs):
            return ()
        return tuple(
            tensor.name
            for tensor in layout.tensors
            if tensor.nbytes
            and tensor.offset_bytes in self._offsets.get(layout.slabs[tensor.slab].slab_id, ())
        )

    def places(self) -> Iterator[tuple[SlabId, int]]:
        """Slab and offset of everything damaged."""
        for slab_id, offsets in self._offsets.items():
            for offset_bytes in sorted(offsets):
                yield slab_id, offset_bytes
