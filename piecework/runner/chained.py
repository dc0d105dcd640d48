"""A step as one call: the body's chain over a paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from piecework.compile.chain import Addresses, Chain
from piecework.compile.chain_link import NotChainedError
from piecework.devices import Device
from piecework.errors import CaptureError
from piecework.graph.program import Program
from piecework.kvcache import AttentionMetadata, PagedKVCache

log = logging.getLogger("piecework.capture")


def make_chain(
    program: Program, device: Device, wanted: bool, cache_dtype: torch.dtype | None = None
) -> Chain | str:
    """Return the program as one call, or why it runs piece by piece, which is logged too."""
    if not wanted:
        reason = "chain is false"
    elif not device.chains:
        reason = f"the device {device.name} launches each piece"
    else:
        try:
            return Chain(program, cache_dtype)
        except NotChainedError as error:
            reason = error.reason
    log.info("steps outside graphs run piece by piece: %s", reason)
    return reason


class ChainedStep:
    """Runs steps over one cache.

    Addresses are looked up once, and again when the cache has new tensors. A weight that gets other memory
    is not noticed, as in a captured graph; with `debug` all addresses are looked up at every step.
    """

    def __init__(self, chain: Chain, cache: PagedKVCache, *, debug: bool = False) -> None:
        self._chain = chain
        self._cache = cache
        self._debug = debug
        self._look_up()

    def __call__(self, inputs: Sequence[Tensor], metadata: AttentionMetadata) -> Tensor:
        """Run the program on its inputs; see GraphRunner.

        Raises CaptureError, with `debug`, where a tensor moved.
        """
        keys, values, addresses = self._found
        if self._cache.keys is not keys or self._cache.values is not values:
            addresses = self._look_up()
        elif self._debug and self._addresses().packed != addresses.packed:
            raise CaptureError("a weight or the KV cache moved: steps read the address that it had first")
        index = (metadata.slots, metadata.page_table, metadata.query_starts, metadata.context_lengths)
        return self._chain.run(inputs, index, addresses)

    def _addresses(self) -> Addresses:
        cache = self._cache
        return self._chain.addresses(cache.keys, cache.values, cache.key_scales, cache.value_scales)

    def _look_up(self) -> Addresses:
        keys, values = self._cache.keys, self._cache.values
        addresses = self._addresses()
        self._found = (keys, values, addresses)  # one value, so that threads see what belongs together
        return addresses
