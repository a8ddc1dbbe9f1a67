"""How many tokens and heads a program takes, by chip and number of tokens."""

from __future__ import annotations

from specdec_kernels.launch import lanes

NUM_WARPS = 4
_INTERPRETER_ROWS = 2048
_ROWS = 32
_ROWS_OF_FEW_TOKENS = 16  # more programs where a decode step has few tokens
_FEW_TOKENS = 256
_MAX_HEADS = 8


def tile(chip: str, tokens: int, heads: int, kv_heads: int) -> dict[str, int]:
    """TOKENS and HEADS of a program. The interpreter takes all heads, because only the number of programs costs."""
    if chip == "interpreter":
        block = lanes(max(heads, kv_heads))
        return dict(TOKENS=lanes(min(tokens, max(2, _INTERPRETER_ROWS // block))), HEADS=block)
    block = min(lanes(kv_heads), _MAX_HEADS)
    rows = _ROWS_OF_FEW_TOKENS if tokens <= _FEW_TOKENS else _ROWS
    return dict(TOKENS=max(2, rows // block), HEADS=block)
