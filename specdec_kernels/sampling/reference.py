"""Definition of token selection, filters, penalties and the random stream in plain torch, computed in float64."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.sampling.types import MASK_BITS, TARGET_STREAM, Forbidden, Penalties, Picked, SamplingTensors

_ROUNDS = 10
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_LOW32 = 0xFFFFFFFF
_FLOAT32_MAX = torch.finfo(torch.float32).max
# Below this a float32 temperature would be flushed to zero on some chips; the distribution at it is already one-hot.
MIN_TEMPERATURE = 1e-30


class RowDistribution(NamedTuple):
    """The distribution of a row, not normalised."""

    weights: Tensor  # [R, V] float64, 0 where filtered
    values: Tensor  # [R, V] float64: usable logits (or probabilities), -inf elsewhere
    greedy: Tensor  # [R] int64, the lowest id of the largest value
    valid: Tensor  # [R] bool


def pick_tokens(
    logits: Tensor,
    sampling: SamplingTensors,
    positions: Tensor | None = None,
    uniforms: Tensor | None = None,
    *,
    return_logprobs: bool = False,
    stream: int = TARGET_STREAM,
    probabilities: bool = False,
) -> Picked:
    """See `specdec_kernels.sampling.pick_tokens`; with `probabilities` the rows hold probabilities, not logits."""
    rows = row_distribution(logits, sampling, probabilities)
    tokens = rows.greedy
    if sampling.temperature is not None:
        if uniforms is None:
            assert sampling.seeds is not None and positions is not None
            uniforms = philox_uniform(sampling.seeds, positions, stream)
        tokens = torch.where(sampling.temperature > 0, inverse_cdf(rows.weights, uniforms), tokens)
    tokens = torch.where(rows.valid, tokens, 0)
    logprobs = token_logprobs(logits, tokens, probabilities) if return_logprobs else None
    return Picked(tokens, rows.valid, logprobs)


def row_distribution(logits: Tensor, sampling: SamplingTensors, probabilities: bool = False) -> RowDistribution:
    """Weights [R, V] at the temperature (none: at 1) and under the filters of `sampling` [R]."""
    values = _usable(logits)
    top = values.amax(-1) if logits.shape[-1] else values.new_zeros(len(values))
    valid = top > (0 if probabilities else -torch.inf)
    greedy = (values == top[:, None]).int().argmax(-1)
    divisor = torch.ones_like(top)
    if sampling.temperature is not None:
        divisor = sampling.temperature.double()
    divisor = divisor.clamp(min=MIN_TEMPERATURE)[:, None]
    if probabilities:
        weights = values.clamp(min=0)
    else:
        weights = torch.exp((values - torch.where(valid, top, 0.0)[:, None]) / divisor)
    floor = torch.full_like(top, -torch.inf)
    if sampling.top_k is not None:
        floor = torch.maximum(floor, _top_k_floor(values, sampling.top_k))
    if sampling.top_p is not None:
        kept = torch.where(values >= floor[:, None], weights, 0.0)
        floor = torch.maximum(floor, _top_p_floor(values, kept, sampling.top_p.double()))
    if sampling.min_p is not None:
        share = sampling.min_p.double().nan_to_num(0.0).clamp(0, 1)
        lowest = top * share if probabilities else top + divisor[:, 0] * share.log()
        floor = torch.maximum(floor, lowest)
    weights = torch.where(values >= floor[:, None], weights, 0.0)
    return RowDistribution(weights, values, greedy, valid)


def _usable(logits: Tensor) -> Tensor:
    """Float64 values with NaN as -inf and +inf as the largest float32."""
    return torch.nan_to_num(logits.double(), nan=-torch.inf, posinf=_FLOAT32_MAX, neginf=-torch.inf)


def _top_k_floor(values: Tensor, top_k: Tensor) -> Tensor:
    """The k-th largest value of each row; -inf where the filter is off."""
    active = top_k > 0
    place = torch.where(active, top_k.long(), 1).clamp(max=values.shape[-1]) - 1
    kth = values.sort(-1, descending=True).values.gather(-1, place[:, None])[:, 0]
    return torch.where(active, kth, -torch.inf)


def _top_p_floor(values: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest value v with weight{> v} < p * total, at most the largest value; -inf where the filter is off."""
    ordered, order = values.sort(-1, descending=True)
    running = weights.gather(-1, order).cumsum(-1)
    before = torch.cat([torch.zeros_like(running[:, :1]), running[:, :-1]], -1)
    kept = (before < top_p[:, None] * running[:, -1:]).sum(-1).clamp(min=1)
    floor = ordered.gather(-1, kept[:, None] - 1)[:, 0]
    return torch.where(top_p < 1, floor, -torch.inf)


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """First token whose cumulative weight exceeds u * total; tokens of weight zero are passed over."""
    # A row without a usable logit has no positive weight; its token is replaced by the caller.
    cumulative = weights.cumsum(-1)
    beyond = (cumulative > uniforms[:, None] * cumulative[:, -1:]) & (weights > 0)
    last_positive = weights.shape[1] - 1 - (weights > 0).flip(-1).int().argmax(-1)
    return torch.where(beyond.any(-1), beyond.int().argmax(-1), last_positive)


def token_logprobs(logits: Tensor, tokens: Tensor, probabilities: bool = False) -> Tensor:
    """[R] float32: log of softmax(logits), or of the normalised row, at `tokens` [R]; -inf in rows not valid."""
    values = _usable(logits)
    logs = values.clamp(min=0).log() if probabilities else values
    chosen = logs.gather(-1, tokens[:, None])[:, 0] - logs.logsumexp(-1)
    return torch.nan_to_num(chosen, nan=-torch.inf, neginf=-torch.inf).float()


def filtered_probs(logits: Tensor, sampling: SamplingTensors, probabilities: bool = False) -> Tensor:
    """See `specdec_kernels.sampling.filtered_probs`; with `probabilities` the rows hold probabilities, not logits."""
    rows = row_distribution(logits, sampling, probabilities)
    weights, temperature = rows.weights, sampling.temperature
    if not probabilities:
        point = torch.zeros_like(weights).scatter_(-1, rows.greedy[:, None], 1.0)
        sampled = torch.zeros_like(rows.valid) if temperature is None else temperature > 0
        weights = torch.where(sampled[:, None], weights, point)
    normalised = weights / weights.sum(-1, keepdim=True)
    return torch.where(rows.valid[:, None], normalised, 0.0).float()


def philox_uniform(
    seeds: Tensor, positions: Tensor, stream: int = TARGET_STREAM, slots: Tensor | None = None
) -> Tensor:
    """Uniforms in (0, 1) float64, keyed by (seed, position, stream, slot).

    The key is the seed's low and high word, the counter (position's low word, its high word, stream, slot). The first
    output word and the upper 20 bits of the second are k < 2^52, and u = (k + 1/2) / 2^52. `seeds`, `positions` and
    `slots` are int64 of one shape, slots in [0, 2^32).
    """
    # Of the four words of a counter, the first and third are multiplied, each by a factor of its own.
    multiplied = torch.stack([positions & _LOW32, torch.full_like(positions, stream)])
    others = torch.stack([(positions >> 32) & _LOW32, torch.zeros_like(positions) if slots is None else slots])
    factors, steps = (torch.stack([torch.full_like(positions, n) for n in pair]) for pair in (_MULTIPLIERS, _KEY_STEPS))
    keys = torch.stack([seeds & _LOW32, (seeds >> 32) & _LOW32])
    for _ in range(_ROUNDS):
        product = (multiplied * factors).flip(0)  # all 64 bits, whatever the sign
        multiplied, others = (product >> 32) & _LOW32 ^ others ^ keys, product & _LOW32
        keys = (keys + steps) & _LOW32
    return ((multiplied[0] << 21) | (others[0] >> 12 << 1) | 1).double() * 2.0**-53


def apply_penalties(call: Penalties) -> None:
    logits, tokens, mask, output_counts, prompt_seen, repetition, presence, frequency, bias = call
    batch, num_nodes, vocab = logits.shape
    node = torch.arange(num_nodes, device=logits.device)
    on_path = ((mask[:, :, node // 64] >> (node % 64)) & 1).bool() & (node > 0)
    known = (tokens >= 0) & (tokens < vocab)
    drafted = torch.nn.functional.one_hot(tokens.clamp(0, vocab - 1), vocab) * known[..., None]
    counts = output_counts[:, None] + torch.einsum("bij,bjv->biv", on_path.double(), drafted.double())
    seen = counts > 0 if prompt_seen is None else (counts > 0) | prompt_seen[:, None]
    value = logits.double()
    factor = repetition.double()[:, None, None]
    value = torch.where(seen, torch.where(value > 0, value / factor, value * factor), value)
    value = value - frequency.double()[:, None, None] * counts - presence.double()[:, None, None] * (counts > 0)
    if bias is not None:
        value = value + bias.double()[:, None]
    logits.copy_(value)


def count_tokens(counts: Tensor, tokens: Tensor, num: Tensor) -> None:
    vocab = counts.shape[1]
    column = torch.arange(tokens.shape[1], device=tokens.device)
    counted = (column < num[:, None]) & (tokens >= 0) & (tokens < vocab)
    counts.scatter_add_(1, tokens.clamp(0, vocab - 1), counted.to(counts.dtype))


def forbid_tokens(call: Forbidden) -> None:
    logits, tokens, mask, positions, history, lengths, words, until = call
    batch, num_nodes, vocab = logits.shape
    node, before = torch.arange(num_nodes, device=logits.device), words.shape[2] - 1
    on_path = ((mask[:, :, node // 64] >> (node % 64)) & 1).bool()
    # [B, N, K - 1]: the positions whose tokens are compared with the columns of `words` before the last.
    place = positions[:, :, None] - torch.arange(before - 1, -1, -1, device=logits.device)
    drafted = on_path[:, :, None] & (positions[:, None, None] == place[..., None])
    from_tree = (drafted * tokens[:, None, None]).sum(-1)
    from_text = history.gather(1, place.clamp(0, max(history.shape[1] - 1, 0)).flatten(1)).view_as(place)
    from_text = torch.where(place >= 0, from_text, -2)
    text = torch.where(place >= lengths[:, None, None], from_tree, from_text)
    wanted, last = words[:, None, :, :-1], words[:, None, :, -1].expand(-1, num_nodes, -1)
    applies = ((wanted < 0) | (wanted == text[:, :, None])).all(-1) & (positions[..., None] + 1 < until[:, None])
    # One column more takes what forbids nothing.
    forbidden = torch.zeros(batch, num_nodes, vocab + 1, dtype=torch.bool, device=logits.device)
    forbidden.scatter_(2, torch.where(applies & (last >= 0), last, vocab).clamp(max=vocab), True)
    logits.masked_fill_(forbidden[..., :vocab], -torch.inf)


def mask_tokens(logits: Tensor, bits: Tensor, constrained: Tensor) -> None:
    token = torch.arange(logits.shape[-1], device=logits.device)
    allowed = ((bits[..., token // MASK_BITS] >> (token % MASK_BITS)) & 1) != 0
    logits.masked_fill_(~allowed & (constrained != 0)[:, None, None], -torch.inf)
