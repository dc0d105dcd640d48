"""What the engine asks of a kind of hardware."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import nn


class Device(ABC):
    """One piece of hardware. Everything that knows which hardware it is lives in a subclass.

    `name` is what the user wrote (`cpu`), `torch_device` where its tensors live, `op_order` the names of
    the op implementations it prefers, first choice first.
    """

    name: str
    torch_device: torch.device
    op_order: tuple[str, ...]

    @abstractmethod
    def default_dtype(self) -> torch.dtype:
        """Return the precision that `dtype=auto` means here."""

    @abstractmethod
    def supports_dtype(self, dtype: torch.dtype) -> bool:
        """Say whether models can run in `dtype` here."""

    @abstractmethod
    def free_memory(self) -> int:
        """Return the bytes that can still be allocated."""

    @abstractmethod
    def default_kv_cache_memory(self) -> int:
        """Return the bytes that the KV cache takes where the user names no size."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything that was submitted has run."""

    def set_threads(self, threads: int | None) -> None:  # noqa: B027 - most devices have no threads to set
        """Use this many host threads for computation; None leaves the default."""

    def prepare_weights(self, model: nn.Module) -> None:  # noqa: B027 - most devices take weights as they are
        """Bring the weights of a loaded model, in place, into the form that this device's ops want."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor of zeros on the device."""
        return torch.zeros(shape, dtype=dtype, device=self.torch_device)
