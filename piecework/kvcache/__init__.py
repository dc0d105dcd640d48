"""KV cache: pages, and who has them."""

from piecework.kvcache.capacity import Capacities
from piecework.kvcache.carried import CarriedPages
from piecework.kvcache.metadata import AttentionMetadata
from piecework.kvcache.paged import LayerShape, PagedKVCache, page_bytes, pages_for, slots_of
from piecework.kvcache.pool import DUMMY_PAGE, PageError, PagePool
from piecework.kvcache.prefix import Node, PrefixTree
from piecework.kvcache.static import StaticKVCache

__all__ = [
    "DUMMY_PAGE",
    "AttentionMetadata",
    "Capacities",
    "CarriedPages",
    "LayerShape",
    "Node",
    "PageError",
    "PagePool",
    "PagedKVCache",
    "PrefixTree",
    "StaticKVCache",
    "page_bytes",
    "pages_for",
    "slots_of",
]
