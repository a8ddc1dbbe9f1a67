"""Definition of token selection and of its random stream in plain torch."""

from __future__ import annotations

import torch

from specdec_kernels.sampling.types import TARGET_STREAM, Picked

_ROUNDS = 10
_MULTIPLIER_A, _MULTIPLIER_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_LOW32 = 0xFFFFFFFF
# Below this a float32 temperature would be flushed to zero on some chips; the law at it is already one-hot.
MIN_TEMPERATURE = 1e-30


def pick_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
) -> Picked:
    """See `specdec_kernels.sampling.pick_tokens`."""
    if logits.shape[0] == 0:
        empty = torch.empty(0, dtype=torch.int64, device=logits.device)
        return Picked(empty, empty.bool())
    usable = torch.nan_to_num(logits.float(), nan=-torch.inf, neginf=-torch.inf)
    top = usable.amax(-1)
    valid = top > -torch.inf
    greedy = (usable == top[:, None]).int().argmax(-1)
    tokens = greedy
    if temperature is not None:
        if uniforms is None:
            assert seeds is not None and positions is not None
            uniforms = philox_uniform(seeds, positions)
        tokens = torch.where(temperature > 0, _inverse_cdf(usable, top, temperature, uniforms), greedy)
    return Picked(torch.where(valid, tokens, 0), valid)


def _inverse_cdf(
    usable: torch.Tensor, top: torch.Tensor, temperature: torch.Tensor, uniforms: torch.Tensor
) -> torch.Tensor:
    """First token whose cumulative weight exceeds u * total; tokens of weight zero are passed over."""
    below_top = usable.double() - top.double()[:, None]
    weights = torch.exp(below_top / temperature.double().clamp(min=MIN_TEMPERATURE)[:, None])
    # A row without a usable logit has NaN weights here; its token is replaced by the caller.
    cumulative = weights.cumsum(-1)
    beyond = (cumulative > uniforms.double()[:, None] * cumulative[:, -1:]) & (weights > 0)
    last_positive = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.where(beyond.any(-1), beyond.int().argmax(-1), last_positive)


def philox_uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int = TARGET_STREAM) -> torch.Tensor:
    """Uniforms in [0, 1) with 24 bits, keyed by (seed, position, stream).

    Philox 4x32-10 (Salmon et al., SC 2011) with key = the seed's low and high word and counter = (position's
    low word, its high word, stream, 0); the first output word gives u = (word >> 8) / 2^24.

    Args:
        seeds: [...] int64, any value.
        positions: [...] int64, of the same shape.
        stream: number of the use, see `types`.

    Returns:
        [...] float32.
    """
    words = [
        positions & _LOW32,
        (positions >> 32) & _LOW32,
        torch.full_like(positions, stream),
        positions * 0,
    ]
    keys = [seeds & _LOW32, (seeds >> 32) & _LOW32]
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply_wide(words[0], _MULTIPLIER_A)
        high_b, low_b = _multiply_wide(words[2], _MULTIPLIER_B)
        words = [high_b ^ words[1] ^ keys[0], low_b, high_a ^ words[3] ^ keys[1], low_a]
        keys = [(keys[0] + _KEY_A) & _LOW32, (keys[1] + _KEY_B) & _LOW32]
    return (words[0] >> 8).float() * 2.0**-24


def _multiply_wide(word: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 arithmetic that never passes 2^63."""
    by_low, by_high = word * (factor & 0xFFFF), word * (factor >> 16)
    high = (by_high + (by_low >> 16)) >> 16
    low = (by_low + ((by_high & 0xFFFF) << 16)) & _LOW32
    return high, low
