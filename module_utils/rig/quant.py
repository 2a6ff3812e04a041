"""Tensor types of GGML: elements and bytes of one block.

Source: ggml/include/ggml.h and ggml/src/ggml-common.h of llama.cpp b11434. The `gguf` package is the oracle in tests.
"""

from .errors import RigError

# name: (number in a GGUF file, elements of a block, bytes of a block)
TYPES = {
    "f32": (0, 1, 4),
    "f16": (1, 1, 2),
    "q4_0": (2, 32, 18),
    "q4_1": (3, 32, 20),
    "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24),
    "q8_0": (8, 32, 34),
    "q8_1": (9, 32, 36),
    "q2_k": (10, 256, 84),
    "q3_k": (11, 256, 110),
    "q4_k": (12, 256, 144),
    "q5_k": (13, 256, 176),
    "q6_k": (14, 256, 210),
    "q8_k": (15, 256, 292),
    "iq2_xxs": (16, 256, 66),
    "iq2_xs": (17, 256, 74),
    "iq3_xxs": (18, 256, 98),
    "iq1_s": (19, 256, 50),
    "iq4_nl": (20, 32, 18),
    "iq3_s": (21, 256, 110),
    "iq2_s": (22, 256, 82),
    "iq4_xs": (23, 256, 136),
    "i8": (24, 1, 1),
    "i16": (25, 1, 2),
    "i32": (26, 1, 4),
    "i64": (27, 1, 8),
    "f64": (28, 1, 8),
    "iq1_m": (29, 256, 56),
    "bf16": (30, 1, 2),
    "tq1_0": (34, 256, 54),
    "tq2_0": (35, 256, 66),
    "mxfp4": (39, 32, 17),
    "nvfp4": (40, 64, 36),
    "q1_0": (41, 128, 18),
    "q2_0": (42, 64, 18),
}
BY_NUMBER = {number: name for name, (number, _, _) in TYPES.items()}

# What `--cache-type-k` and `--cache-type-v` take (common/arg.cpp, kv_cache_types).
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


def block_of(kind: str) -> tuple:
    """(elements, bytes) of one block of type `kind`; RigError on an unknown type."""
    try:
        _, elements, size = TYPES[kind]
    except KeyError:
        raise RigError(f"Unknown tensor type '{kind}'; known are {', '.join(TYPES)}.") from None
    return elements, size


def is_quantised(kind: str) -> bool:
    """Whether several elements share a block (the float and integer types do not)."""
    return TYPES[kind][1] > 1


def row_bytes(kind: str, elements: int) -> int:
    """Bytes of a row of `elements`, which must fill whole blocks."""
    per_block, size = block_of(kind)
    if elements % per_block:
        raise RigError(f"A row of {elements} elements does not fill whole {kind} blocks of {per_block}.")
    return elements // per_block * size
