"""KV cache: pages, and who has them."""

from piecework.kvcache.metadata import AttentionMetadata
from piecework.kvcache.paged import LayerShape, PagedKVCache, page_bytes, pages_for, slots_of
from piecework.kvcache.pool import DUMMY_PAGE, PageError, PagePool
from piecework.kvcache.prefix import Node, PrefixTree

__all__ = [
    "DUMMY_PAGE",
    "AttentionMetadata",
    "LayerShape",
    "Node",
    "PageError",
    "PagePool",
    "PagedKVCache",
    "PrefixTree",
    "page_bytes",
    "pages_for",
    "slots_of",
]
