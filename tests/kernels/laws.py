"""A toy language model with a known joint law, decoded speculatively through an acceptance function.

The target is a Markov chain: the law of a token depends on the one before it, so a row taken from the wrong
node or a coin used twice shows in the joint law of several tokens, although it may leave every marginal
right. Drafts are a deterministic function of the context. Two designs: `agreeing` drafts likely tokens, so
that whole blocks are accepted and the bonus row matters; `opposed` drafts unlikely ones and bans a token, so
that the law given a miss and the support matter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.stats import chi2

from specdec_kernels import Accepted, build_tree

AcceptFunction = Callable[..., Accepted]
ALPHA = 1e-6
EMITTED = 4  # tokens whose joint law is tested
# Parents of the nodes of two draft shapes. The last node is padding: unused, with token and row of its own.
SHAPES = {"chain": [-1, 0, 1, 2, -1], "tree": [-1, 0, 0, 1, 1, 2, 2, -1]}


@dataclass(frozen=True)
class Design:
    """Target logits and drafted children for every context token."""

    logits: torch.Tensor  # [V, V] float32, row = context
    children: torch.Tensor  # [V, 2] int64, drafted continuations of each context, best first
    banned: int | None

    @property
    def vocab(self) -> int:
        return self.logits.shape[0]


def make_design(name: str) -> Design:
    """`agreeing` (V = 5) or `opposed` (V = 6, the last token banned)."""
    generator = torch.Generator().manual_seed(11)
    if name == "agreeing":
        logits = torch.randn(5, 5, generator=generator) * 1.2
        return Design(logits, logits.topk(2).indices, None)
    logits = torch.randn(6, 6, generator=generator) * 1.2
    unlikely = (-logits).topk(2).indices
    unlikely[0, 1] = 5  # a banned token is drafted in some contexts
    logits[:, 5] = float("-inf")
    return Design(logits, unlikely, 5)


def draft(
    design: Design, shape: str, context: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, N] and parents [B, N] int32 of the draft that follows `context` [B]."""
    parents = SHAPES[shape]
    tokens = torch.zeros(len(context), len(parents), dtype=torch.int64)
    tokens[:, 0] = context
    born: dict[int, int] = {}
    for node, parent in enumerate(parents[1:], start=1):
        if parent < 0:
            tokens[:, node] = (
                design.children[context, 1] if shape == "chain" else (context + 1) % design.vocab
            )
            continue
        tokens[:, node] = design.children[tokens[:, parent], born.get(parent, 0)]
        born[parent] = born.get(parent, 0) + 1
    return tokens, torch.tensor(parents, dtype=torch.int32).repeat(len(context), 1)


def decode(
    accept: AcceptFunction,
    design: Design,
    shape: str,
    temperature: torch.Tensor,
    first_seed: int = 0,
    impl: str = "reference",
) -> torch.Tensor:
    """[B, EMITTED] tokens that follow token 0, one row an entry of `temperature`."""
    out = torch.full((len(temperature), EMITTED), -1)
    padding = [node for node, parent in enumerate(SHAPES[shape]) if node and parent < 0]
    rows = torch.arange(len(temperature))  # requests that still want tokens
    context, written = torch.zeros_like(rows), torch.zeros_like(rows)
    lengths = torch.full_like(rows, 3)
    while len(rows):
        tokens, parents = draft(design, shape, context, lengths)
        tree = build_tree(parents, lengths, impl=impl)
        logits = design.logits[tokens]
        logits[:, padding] = torch.arange(design.vocab).float() * 2.0 - 9.0  # a row nobody may read
        keys = dict(temperature=temperature[rows], seeds=rows + first_seed)
        step = accept("target_only", tokens, tree, logits, lengths, 3, **keys, impl=impl)
        for token in step.tokens.unbind(1):
            fits = (token >= 0) & (written < EMITTED)
            out[rows[fits], written[fits]] = token[fits]
            written = written + fits
        hungry = written < EMITTED
        rows, written, context = rows[hungry], written[hungry], step.bonus[hungry]
        lengths = step.new_lengths[hungry]
    return out


def joint_law(design: Design, temperature: float) -> torch.Tensor:
    """[V] * EMITTED float64: probability of each sequence after token 0."""
    steps = torch.softmax(design.logits.double() / temperature, -1)
    law = steps[0]
    for _ in range(EMITTED - 1):
        law = law[..., None] * steps
    return law


def assert_law(tokens: torch.Tensor, design: Design, temperature: float) -> None:
    """Fail on an impossible token, and on a Pearson statistic that chance exceeds once in a million."""
    assert int(tokens.min()) >= 0 and int(tokens.max()) < design.vocab, "a token outside the vocabulary"
    if design.banned is not None:
        assert not (tokens == design.banned).any(), "a banned token was emitted"
    weights = design.vocab ** torch.arange(EMITTED - 1, -1, -1)
    observed = torch.bincount((tokens * weights).sum(-1), minlength=design.vocab**EMITTED).double()
    expected = joint_law(design, temperature).flatten() * len(tokens)
    common = expected >= 5
    if expected[~common].sum() >= 5:
        observed = torch.cat([observed[common], observed[~common].sum()[None]])
        expected = torch.cat([expected[common], expected[~common].sum()[None]])
    else:
        observed, expected = observed[common], expected[common]
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    limit = chi2.isf(ALPHA, len(observed) - 1)
    assert statistic < limit, (
        f"chi-square {statistic:.0f} over {limit:.0f} ({len(observed) - 1} degrees of freedom)"
    )


def replaced_bonus(accepted: Accepted, bonus: torch.Tensor) -> Accepted:
    """The same outcome with another bonus token."""
    tokens = accepted.tokens.scatter(1, accepted.num_accepted[:, None].long(), bonus[:, None])
    return accepted._replace(tokens=tokens, bonus=bonus)
