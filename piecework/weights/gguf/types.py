"""The tensor types of a GGUF file that Piecework reads: their numbers and block sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgmlType:
    """`block` weights take `size` bytes. `name` is the type's name in ggml."""

    name: str
    block: int
    size: int


# Number, block and size of each type as in ggml's `enum ggml_type` and block structs.
READABLE: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    30: GgmlType("BF16", 1, 2),
}


def type_name(number: int) -> str:
    """The name of any ggml type, also of those that Piecework doesn't read."""
    if number in READABLE:
        return READABLE[number].name
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(number).name)
    except ValueError:
        return f"number {number}"
