"""One token a row of logits: the argmax, or an exact draw from softmax(logits / T), without a host round
trip.

A draw is the inverse of the cumulative law at one uniform u: the first token j with sum_{i <= j} w_i > u *
sum_i w_i, w_i = exp((l_i - max l) / T). The uniform comes from the counter-based generator Philox 4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the request's seed and the
position of the row, so a token depends neither on the batch it was drawn in nor on whether it was drawn alone
or while verifying a block. The vocabulary is split in tiles: one pass leaves (max, argmax, sum of
exponentials) a tile, a second combines them, finds the tile that the uniform falls in, and reads that tile
alone again.

Random stream: (seed, position, stream id) -> word -> u = (word >> 8) / 2^24 in [0, 1). `position` is the
position of the row's input token; the drawn token will stand one further.
"""

from __future__ import annotations

import torch

from specdec_kernels.checks import expect_contiguous, expect_dtype, expect_same_device, expect_shape
from specdec_kernels.launch import use_triton
from specdec_kernels.sampling import reference
from specdec_kernels.sampling.types import Picked

__all__ = ["Picked", "pick_tokens"]


def pick_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    impl: str = "auto",
) -> Picked:
    """Choose one token a row.

    NaN counts as -inf and +inf as the largest float32. A row in which nothing else than -inf and NaN stands
    gives token 0 and `valid` False. A token of logit -inf is never chosen otherwise, nor one outside the
    vocabulary.

    Args:
        logits: [R, V] float32, float16 or bfloat16, V >= 1; the last dimension has stride 1, rows may be
            strided.
        temperature: [R] float32 or None. A row draws where it is above 0 and takes its argmax (lowest id
            among equals) elsewhere; None is 0 for all rows.
        seeds: [R] int64, any value; needed with `temperature` unless `uniforms` is given.
        positions: [R] int64; needed with `temperature` unless `uniforms` is given.
        uniforms: [R] float32 in [0, 1), replaces the generator (tests of the exact law).
        impl: `auto`, `triton` or `reference`.

    Returns:
        Picked: tokens [R] int64, valid [R] bool.

    Raises:
        ValueError: wrong shape, dtype, strides or devices, temperature without a source of uniforms, unknown
            `impl`.
        RuntimeError: `impl="triton"` where no kernel can run.
    """
    expect_shape("logits", logits, (None, None))
    expect_dtype("logits", logits, torch.float32, torch.float16, torch.bfloat16)
    expect_row_layout(logits)
    check_sources(logits.shape[0], logits.shape[:1], temperature, seeds, positions, uniforms)
    expect_same_device(
        logits=logits, temperature=temperature, seeds=seeds, positions=positions, uniforms=uniforms
    )
    if use_triton(impl, logits):
        import specdec_kernels.sampling.kernel as kernel

        return kernel.pick_tokens(logits, temperature, seeds, positions, uniforms)
    return reference.pick_tokens(logits, temperature, seeds, positions, uniforms)


def expect_row_layout(logits: torch.Tensor) -> None:
    """Raise ValueError unless the vocabulary is the contiguous dimension and not empty."""
    if logits.shape[-1] < 1:
        raise ValueError(f"logits: expected a vocabulary of at least 1, got shape {list(logits.shape)}")
    if logits.shape[-1] > 1 and logits.stride(-1) != 1:
        raise ValueError(
            f"logits: expected stride 1 in the vocabulary dimension, got strides {logits.stride()}"
        )


def check_sources(
    requests: int,
    rows: tuple[int, ...],
    temperature: torch.Tensor | None,
    seeds: torch.Tensor | None,
    positions: torch.Tensor | None,
    uniforms: torch.Tensor | None,
) -> None:
    """Raise ValueError unless the sampling arguments fit `requests` keys and `rows` (a shape) of logits."""
    shapes = {
        "temperature": (temperature, (requests,), torch.float32),
        "seeds": (seeds, (requests,), torch.int64),
        "positions": (positions, rows, torch.int64),
        "uniforms": (uniforms, rows, torch.float32),
    }
    for name, (tensor, shape, dtype) in shapes.items():
        if tensor is not None:
            expect_shape(name, tensor, shape)
            expect_dtype(name, tensor, dtype)
            expect_contiguous(**{name: tensor})
    if temperature is not None and uniforms is None and (seeds is None or positions is None):
        raise ValueError("temperature: expected seeds and positions, or uniforms, to draw with; got neither")
