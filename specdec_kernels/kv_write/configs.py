"""How many tokens and heads a program takes. The number of tokens does not matter: how a tile lies in the registers
decides the order in which the squares of a head are added, and a token has the same bits among any others."""

from __future__ import annotations

from specdec_kernels.launch import lanes

NUM_WARPS = 4
_INTERPRETER_ROWS = 2048
_ROWS = 16
_MAX_HEADS = 8


def tile(chip: str, tokens: int, heads: int, kv_heads: int) -> dict[str, int]:
    """TOKENS and HEADS of a program. The interpreter takes all heads, because only the number of programs costs."""
    if chip == "interpreter":
        block = lanes(max(heads, kv_heads))
        return dict(TOKENS=lanes(min(tokens, max(2, _INTERPRETER_ROWS // block))), HEADS=block)
    block = min(lanes(kv_heads), _MAX_HEADS)
    return dict(TOKENS=max(2, _ROWS // block), HEADS=block)
