"""Host tensors that become device memory on first use, once, and are known by identity and version."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import count

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from piecework.workers.tasks.handles import HandleError, check_bits


@dataclass(frozen=True)
class Deferred:
    """A host tensor that stands for its device memory, which is that of its whole storage.

    Attributes:
        id: of the storage; views have the one of what they are views of, and another offset.
        upload: whether the contents go to the device, where it hasn't them in this version.
        require_existing: whether memory of an earlier use must be there.
        name: for messages.
    """

    ids: TensorIds
    tensor: torch.Tensor
    id: int
    upload: bool = True
    require_existing: bool = False
    name: str = "tensor"

    @property
    def version(self) -> int:
        """The version of the contents as they are now."""
        return self.ids.version(self.tensor, self.id)

    @property
    def offset(self) -> int:
        """Bytes from the storage's start to the tensor's."""
        return int(self.tensor.storage_offset()) * self.tensor.itemsize

    @property
    def whole(self) -> bool:
        """Whether the tensor is all of its storage."""
        return self.tensor.nbytes == self.tensor.untyped_storage().nbytes()

    def bytes(self) -> torch.Tensor:
        """Return the whole storage as bytes [n]; the memory is shared."""
        return torch.empty(0, dtype=torch.uint8).set_(self.tensor.untyped_storage())


class TensorIds:
    """Gives each storage an id that is never used again, whatever lies at its address later."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # any thread may defer
        self._ids = count(1)
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._changes: dict[int, int] = {}

    def defer(
        self,
        tensor: torch.Tensor,
        *,
        upload: bool = True,
        require_existing: bool = False,
        name: str = "tensor",
    ) -> Deferred:
        """Make the record of a tensor; a HandleError where it isn't dense CPU memory inside its storage."""
        check_deferred(tensor, name)
        return Deferred(self, tensor, self._id(tensor), upload, require_existing, name)

    def version(self, tensor: torch.Tensor, ident: int) -> int:
        """Return a number that changes with the contents."""
        counted = 0 if tensor.is_inference() else tensor._version
        return counted + (self._changes.get(ident, 0) << 32)

    def changed(self, tensor: torch.Tensor) -> None:
        """Say that the contents are new, where torch didn't see it: numpy, `.data`, inference tensors."""
        ident = self._id(tensor)
        with self._lock:
            self._changes[ident] = self._changes.get(ident, 0) + 1

    def expired(self) -> list[int]:
        """Return, once, the ids of storages that no tensor has any more."""
        with self._lock:
            gone = [(key, ident) for key, (ref, ident) in self._known.items() if ref.expired()]
            for key, ident in gone:
                del self._known[key]
                self._changes.pop(ident, None)
        return [ident for _, ident in gone]

    def _id(self, tensor: torch.Tensor) -> int:
        # The reference keeps the storage's record (not its data), so that no other one gets its address.
        ref = StorageWeakRef(tensor.untyped_storage())
        with self._lock:
            known = self._known.get(ref.cdata)
            if known is None:
                known = self._known[ref.cdata] = (ref, next(self._ids))
            return known[1]


def check_deferred(tensor: torch.Tensor, name: str) -> None:
    """Refuse, with a HandleError, what can't be uploaded as it lies."""
    if tensor.device.type != "cpu":
        raise HandleError(name, str(tensor.device), "a tensor on the CPU")
    if not tensor.is_contiguous():
        raise HandleError(name, tensor.stride(), "a contiguous tensor")
    check_bits(tensor, name)
    end = tensor.storage_offset() * tensor.itemsize + tensor.nbytes
    if tensor.nbytes == 0 or end > tensor.untyped_storage().nbytes():
        held = f"its storage of {tensor.untyped_storage().nbytes()} bytes"
        raise HandleError(name, tuple(tensor.shape), f"a tensor with elements inside {held}")
