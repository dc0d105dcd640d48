"""Device memory of deferred tensors: made on first use, filled when the host has newer contents."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from piecework.workers.tasks.deferred import Deferred
from piecework.workers.tasks.handles import Handle, HandleError
from piecework.workers.tasks.members import Member, Resident
from piecework.workers.tasks.tags import Tag


def resolve(
    member: Member, tensor: Deferred, tag: Tag, upload: Callable[[torch.Tensor, Handle], None]
) -> Handle:
    """Return where `tensor` is in the worker's memory.

    `upload(bytes, target)` copies the whole storage; it is called where the worker doesn't have this
    version, unless the task overwrites all of it anyway.

    Raises HandleError where nothing is there that the task could read, or `require_existing` finds nothing.
    """
    resident = member.residents.get(tensor.id)
    if resident is not None and not member.alive(resident.generation):
        del member.residents[tensor.id]
        resident = None
    if resident is None and tensor.require_existing:
        raise HandleError("require_existing", tensor.name, f"on {member.name}, from an earlier use")
    if tag.reads and not tensor.upload and not (resident and resident.written):
        raise HandleError("upload", False, f"true: {member.name} has nothing of {tensor.name} to read")
    whole = tensor.bytes()
    if resident is None:
        generation, buffer = member.malloc(whole.nbytes)
        resident = member.residents[tensor.id] = Resident(generation, buffer)
    base = Handle(member.name, resident.generation, resident.buffer, (whole.nbytes,), torch.uint8)
    overwritten = tensor.whole and not tag.reads and tag.writes
    if tensor.upload and resident.version != tensor.version and not overwritten:
        written, resident.version, resident.written = resident.written, tensor.version, True
        try:
            upload(whole, base)
        except BaseException:
            resident.version, resident.written = None, written
            raise
    if tag.writes:
        resident.written = True
        if tensor.whole:
            resident.version = tensor.version
    return base.view(tensor.offset, tuple(tensor.tensor.shape), tensor.tensor.dtype)


def remember(member: Member, tensor: Deferred) -> Callable[[], None]:
    """Return what undoes the notes of a `resolve` whose task is not submitted: the memory is as it was."""
    known = member.residents.get(tensor.id)
    version, written = (known.version, known.written) if known else (None, False)

    def put_back() -> None:
        resident = member.residents.get(tensor.id)
        if resident is not None and (known is None or resident is known):
            resident.version, resident.written = version, written

    return put_back


def settle(member: Member, tensor: Deferred, tag: Tag, failed: bool) -> None:
    """Note, after an upload or a task that writes, whether the memory holds what it should."""
    resident = member.residents.get(tensor.id)
    if failed and tag.writes and resident is not None:
        resident.version, resident.written = None, False


def collect(member: Member, expired: Iterable[int]) -> None:
    """Give back the memory of host tensors that don't exist any more."""
    for ident in expired:
        resident = member.residents.pop(ident, None)
        if resident is not None:
            bytes_of = Handle(member.name, resident.generation, resident.buffer, (1,), torch.uint8)
            member.discard(bytes_of, "its host tensor is gone")
