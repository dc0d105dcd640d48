"""The static buffers that captured graphs read: one set per runner, sliced per size.

A captured size is nearly always larger than the batch, so every load also resets what lies behind the
batch: a stale row would compute with the previous batch's tokens and write into a live request's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piecework.devices import Device
from piecework.errors import CaptureError
from piecework.kvcache import AttentionMetadata


class StaticBuffers:
    """Inputs of a program for up to `tokens` rows, and attention's for up to `sequences` sequences.

    They are allocated once and never again, since graphs know their addresses. Sequence lengths stay on
    the host where the device's graphs take them from there.
    """

    def __init__(self, device: Device, *, tokens: int, sequences: int, table_width: int) -> None:
        self.host_lengths = device.lengths == "host"
        self.input_ids = device.zeros((tokens,), torch.int64)
        self.positions = device.zeros((tokens,), torch.int64)
        self.num_valid_rows = device.zeros((1,), torch.int64)
        self.slots = device.zeros((sequences,), torch.int32)
        self.page_table = device.zeros((sequences, table_width), torch.int32)
        if self.host_lengths:
            self.query_starts = torch.zeros(sequences + 1, dtype=torch.int32)
            self.context_lengths = torch.zeros(sequences, dtype=torch.int32)
        else:
            self.query_starts = device.zeros((sequences + 1,), torch.int32)
            self.context_lengths = device.zeros((sequences,), torch.int32)

    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers on the device by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def inputs(self, size: int) -> dict[str, Tensor]:
        """Return a program's inputs by name: input_ids [size], positions [size], num_valid_rows [1]."""
        return {
            "input_ids": self.input_ids[:size],
            "positions": self.positions[:size],
            "num_valid_rows": self.num_valid_rows,
        }

    def metadata(self, size: int) -> AttentionMetadata:
        """Return attention's buffers for `size` sequences of one row each."""
        return AttentionMetadata(
            self.slots[:size],
            self.page_table[:size],
            self.query_starts[: size + 1],
            self.context_lengths[:size],
            max_query_length=1,
        )

    def host_arguments(self, size: int) -> dict[str, Tensor]:
        """Return what a graph must be told before a replay, by the names that attention gives it."""
        if not self.host_lengths:
            return {}
        return {
            "query_starts": self.query_starts[: size + 1],
            "context_lengths": self.context_lengths[:size],
        }

    def load(self, input_ids: Tensor, positions: Tensor, size: int) -> None:
        """Put a batch's T tokens in place; rows T to `size` become token 0 at position 0."""
        rows = input_ids.shape[0]
        _fill("input_ids", self.input_ids, input_ids, size)
        _fill("positions", self.positions, positions, size)
        self.num_valid_rows.fill_(rows)

    def load_metadata(self, metadata: AttentionMetadata, size: int) -> None:
        """Put B sequences of one row each in place; the others, up to `size`, get no row and no tokens.

        The padded rows' keys and values go to the dummy slot 0.
        """
        sequences, width = metadata.page_table.shape
        if width > self.page_table.shape[1]:
            raise CaptureError(
                f"page_table has {width} columns, and the captured graphs read {self.page_table.shape[1]}"
            )
        _fill("slots", self.slots, metadata.slots, size)
        _fill("context_lengths", self.context_lengths, metadata.context_lengths, size)
        _fill("page_table", self.page_table[:, :width], metadata.page_table, size)
        self.page_table[:size, width:].zero_()
        _fill("query_starts", self.query_starts, metadata.query_starts, size + 1, rest=sequences)

    def load_nobody(self, size: int, *, sequences: bool) -> None:
        """Put `size` rows of nobody in place; with `sequences`, each is one token on the dummy page."""
        no_rows = self.input_ids[:0]
        self.load(no_rows, no_rows, size)
        if sequences:
            zeros = torch.zeros(size, dtype=torch.int32)
            starts = torch.arange(size + 1, dtype=torch.int32)
            self.load_metadata(AttentionMetadata(zeros, zeros[:, None], starts, zeros + 1, 1), size)


def _fill(name: str, buffer: Tensor, values: Tensor, size: int, rest: int = 0) -> None:
    """Copy `values` to the beginning of `buffer` and `rest` to what follows, up to `size`."""
    rows = values.shape[0]
    if not rows <= size <= buffer.shape[0]:
        raise CaptureError(
            f"{name}: {rows} rows in a size of {size} do not fit {buffer.shape[0]} static rows"
        )
    buffer[:rows].copy_(values)
    buffer[rows:size].fill_(rest)
