"""The static KV cache: contiguous keys and values, whose strides are those of the program that runs next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piecework.devices import Device
from piecework.errors import DeviceError
from piecework.kvcache.capacity import Capacities
from piecework.kvcache.paged import LayerShape
from piecework.kvcache.relayout import Change, relayout
from piecework.profile import Profile

KEY_DIM = 2
"""The dimension of keys that counts tokens: [1, H, S, E]."""


@dataclass
class _Layout:
    """What lies in a slot: `written` tokens in rows with room for `capacity`, and zeros behind them."""

    capacity: int
    prefill: bool
    written: int = 0


class StaticKVCache:
    """Keys and values of all layers for a few sequences, one in each slot.

    Every program sees the same memory, which is sized for the largest capacity: with room for S tokens, keys
    are [1, H, S, E] at the start of a slot's buffer, and values the same or transposed, [1, H, E, S].
    `arrange` moves the live tokens to the strides of another program. What lies behind them is zero, since a
    NaN under a mask would still poison a softmax times V.

    Towards the scheduler a slot is a page with room for the largest capacity, and page 0, which others pad
    with, is nobody's and has no memory.
    """

    resizable = False
    fixed_because = "a static cache has the capacities that its programs were compiled for (kv_capacities)"

    def __init__(
        self,
        layers: Sequence[LayerShape],
        capacities: Capacities,
        slots: int,
        dtype: torch.dtype,
        device: Device,
        *,
        transpose_values: bool = False,
        profile: Profile | None = None,
    ) -> None:
        self.capacities = capacities
        self.num_pages = self.max_pages = slots + 1
        self.page_size = capacities.largest
        self.dtype = dtype
        self.device = device
        self.value_dim = 3 if transpose_values else KEY_DIM
        self.moved_bytes: Counter[str] = Counter()
        """Bytes that were moved, by why and what: `promotion.keys`, `to_prefill.values`, ..."""
        self._profile = profile or Profile()
        self._shapes = tuple(layers)
        sizes = [(slots, s.num_kv_heads * capacities.largest * s.head_dim) for s in layers]
        self._keys = tuple(device.zeros(size, dtype) for size in sizes)
        self._values = tuple(device.zeros(size, dtype) for size in sizes)
        self._layouts: list[_Layout | None] = [_Layout(capacities.largest, True) for _ in range(slots)]

    @property
    def longest(self) -> int:
        """The longest prompt plus output that a slot has room for."""
        return self.capacities.longest

    @property
    def nbytes(self) -> int:
        """Bytes of all slots of all layers."""
        return sum(t.nbytes for t in (*self._keys, *self._values))

    def capacity(self, slot: int) -> int:
        """Return the room in the rows of a slot as they lie now."""
        layout = self._layouts[slot - 1]
        return 0 if layout is None else layout.capacity

    def keys(self, layer: int, slot: int, capacity: int) -> Tensor:
        """Return a slot's keys as a program of this capacity sees them: [1, H, S, E]."""
        shape = self._shapes[layer]
        return _view(self._keys[layer][slot - 1], (1, shape.num_kv_heads, capacity, shape.head_dim))

    def values(self, layer: int, slot: int, capacity: int) -> Tensor:
        """Return a slot's values likewise: [1, H, S, E], or transposed [1, H, E, S]."""
        shape = self._shapes[layer]
        sizes = [1, shape.num_kv_heads, shape.head_dim, shape.head_dim]
        sizes[self.value_dim] = capacity
        return _view(self._values[layer][slot - 1], sizes)

    def arrange(self, slot: int, capacity: int, live: int, *, prefill: bool = False) -> None:
        """Lay a slot out for a program: its first `live` tokens stay, and all behind them is zero.

        `prefill`: the program is that of prefill; one of the largest capacity looks the same.

        Raises DeviceError where the slot's tokens were lost when a move failed.
        """
        old = self._layouts[slot - 1]
        if live and (old is None or live > old.written):
            has = "none" if old is None else str(old.written)
            raise DeviceError(
                self.device.name, "run", f"{live} tokens wanted of slot {slot}, which has {has}"
            )
        self._layouts[slot - 1] = None  # until it is done
        if old is None or old.capacity != capacity:
            if live and old is not None:
                self._move(slot, old, _Layout(capacity, prefill), live)
            self._clear(slot, capacity, live, capacity)
        elif live < old.written:
            self._clear(slot, capacity, live, old.written)
        self._layouts[slot - 1] = _Layout(capacity, prefill, live)

    def write(self, slot: int, count: int, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        """Append the first `count` tokens of a program's results, by layer like the cache's own."""
        layout = self._layouts[slot - 1]
        assert layout is not None, "the slot was arranged for the program"
        start, stop = layout.written, layout.written + count
        for layer in range(len(self._shapes)):
            kept = self.keys(layer, slot, layout.capacity), self.values(layer, slot, layout.capacity)
            for whole, new, dim in zip(
                kept, (keys[layer], values[layer]), (KEY_DIM, self.value_dim), strict=True
            ):
                whole.narrow(dim, start, count).copy_(new.narrow(dim, 0, count))
        layout.written = stop

    def _move(self, slot: int, old: _Layout, new: _Layout, live: int) -> None:
        changes: list[Change] = []
        reason = _reason(old, new)
        for layer in range(len(self._shapes)):
            for name, view, dim in (
                ("keys", self.keys, KEY_DIM),
                ("values", self.values, self.value_dim),
            ):
                src, dst = (view(layer, slot, x.capacity).narrow(dim, 0, live) for x in (old, new))
                changes.append(Change(src, dst, dim, dim))
                self.moved_bytes[f"{reason}.{name}"] += changes[-1].plan.moved
        moved = relayout(changes, self.device.relayout, self._profile)
        self._profile.add_bytes(f"kv.{reason}", moved)

    def _clear(self, slot: int, capacity: int, start: int, stop: int) -> None:
        for layer in range(len(self._shapes)):
            self.keys(layer, slot, capacity).narrow(KEY_DIM, start, stop - start).zero_()
            self.values(layer, slot, capacity).narrow(self.value_dim, start, stop - start).zero_()


def _view(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    return buffer[: math.prod(shape)].view(*shape)


def _reason(old: _Layout, new: _Layout) -> str:
    if new.prefill:
        return "to_prefill"
    if old.prefill:
        return "to_decode"
    return "promotion" if new.capacity > old.capacity else "demotion"
