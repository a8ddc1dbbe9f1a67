"""A toy language model with a known joint distribution, decoded speculatively through an acceptance function.

The target is a Markov chain: the distribution of a token depends on the one before it, so a row taken from the wrong
node or a uniform used twice shows in the joint distribution of several tokens, although it may leave every marginal
right. Two designs: `agreeing` drafts likely tokens, so that whole blocks are accepted and the bonus row matters;
`opposed` drafts unlikely ones and bans a token, so that the distribution given a miss and the support matter. Drafts
are a deterministic function of the context or sampled from a distribution of the drafter's own. Filters are applied
here by sorting Python lists, which no kernel does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.special import chdtri

from specdec_kernels import DRAFT_STREAM, Accepted, SamplingTensors, build_tree, filtered_probs, pick_tokens

AcceptFunction = Callable[..., Accepted]
ALPHA = 1e-6
EMITTED = 4  # tokens whose joint distribution is tested
# Parents of the nodes of two draft shapes. The last node is padding: unused, with token and row of its own.
SHAPES = {"chain": [-1, 0, 1, 2, -1], "tree": [-1, 0, 0, 1, 1, 2, 2, -1]}
DEPTH = 3


@dataclass(frozen=True)
class Filter:
    """Filters that every request of a design has; the defaults are off."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def arguments(self, rows: int) -> dict[str, torch.Tensor]:
        if self == Filter():
            return {}
        kinds = dict(top_k=torch.int32, top_p=torch.float32, min_p=torch.float32)
        return {name: torch.full((rows,), getattr(self, name), dtype=kind) for name, kind in kinds.items()}

    def __call__(self, probs: list[float]) -> list[float]:
        """The distribution after top-k, top-p and min-p, token by token in falling order."""
        order = sorted(range(len(probs)), key=lambda v: -probs[v])
        kept = order[: self.top_k or len(order)]
        total, before, nucleus = sum(probs[v] for v in kept), 0.0, []
        for v in kept:
            if before < self.top_p * total or self.top_p >= 1:
                nucleus.append(v)
            before += probs[v]
        kept = [v for v in nucleus if probs[v] >= self.min_p * probs[order[0]]]
        total = sum(probs[v] for v in kept)
        return [probs[v] / total if v in kept else 0.0 for v in range(len(probs))]


OFF = Filter()
# By design; each of the three changes some context of one of them.
FILTERS = {"agreeing": Filter(top_k=4, top_p=0.95, min_p=0.1), "opposed": Filter(top_k=4, top_p=0.9, min_p=0.04)}


@dataclass(frozen=True)
class Design:
    """Target logits and drafted children for every context token."""

    logits: torch.Tensor  # [V, V] float32, row = context
    children: torch.Tensor  # [V, 2] int64, drafted continuations of each context, best first
    banned: int | None
    draft_logits: torch.Tensor  # [V, V] float32, of a drafter that draws

    @property
    def vocab(self) -> int:
        return self.logits.shape[0]


def make_design(name: str) -> Design:
    """`agreeing` (V = 5), `opposed` (V = 6, the last token banned), and two more distributions to draw drafts from:
    `identical` to the target's and `disjoint` from it."""
    generator = torch.Generator().manual_seed(11)
    if name in ("agreeing", "identical"):
        logits = torch.randn(5, 5, generator=generator) * 1.2
        noise = torch.randn(5, 5, generator=generator) * (0.5 if name == "agreeing" else 0.0)
        return Design(logits, logits.topk(2).indices, None, logits + noise)
    logits = torch.randn(6, 6, generator=generator) * 1.2
    unlikely = (-logits).topk(2).indices
    unlikely[0, 1] = 5  # a banned token is drafted in some contexts
    drafted = -logits
    if name == "disjoint":
        drafted[:, :3] = float("-inf")
        logits[:, 3:] = float("-inf")
    logits[:, 5] = float("-inf")
    return Design(logits, unlikely, 5, drafted)


def drafted(design: Design, shape: str, context: torch.Tensor) -> torch.Tensor:
    """Tokens [B, N] of the draft that follows `context` [B]: the design's children."""
    tokens = torch.zeros(len(context), len(SHAPES[shape]), dtype=torch.int64)
    tokens[:, 0] = context
    born: dict[int, int] = {}
    for node, parent in enumerate(SHAPES[shape][1:], start=1):
        if parent < 0:
            tokens[:, node] = design.children[context, 1] if shape == "chain" else (context + 1) % design.vocab
            continue
        tokens[:, node] = design.children[tokens[:, parent], born.get(parent, 0)]
        born[parent] = born.get(parent, 0) + 1
    return tokens


def decode(
    accept: AcceptFunction,
    design: Design,
    rule: str,
    temperature: torch.Tensor,
    shape: str = "chain",
    *,
    first_seed: int = 0,
    impl: str = "reference",
    chosen: Filter = OFF,
    draft_temperature: float = 0.9,
) -> torch.Tensor:
    """[B, EMITTED] tokens that follow token 0, one row an entry of `temperature`.

    Under `target_only` the drafts are the design's children, under another rule they are a chain that is sampled from
    the design's draft distribution under the same filters.
    """
    vocab, samples = design.vocab, rule != "target_only"
    padding = [node for node, parent in enumerate(SHAPES[shape]) if node and parent < 0]

    def drafting(rows: int, seeds: torch.Tensor | None = None) -> SamplingTensors:
        return SamplingTensors(torch.full((rows,), draft_temperature), seeds=seeds, **chosen.arguments(rows))

    recorded = filtered_probs(design.draft_logits, drafting(vocab), impl="reference")

    def sampled(rows: torch.Tensor, context: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        tokens = torch.full((len(rows), DEPTH + 2), 1)
        tokens[:, 0] = context
        for depth in range(1, DEPTH + 1):
            tokens[:, depth] = pick_tokens(
                design.draft_logits[tokens[:, depth - 1]], drafting(len(rows), rows), lengths * (DEPTH + 1) + depth,
                stream=DRAFT_STREAM, impl="reference",
            ).tokens  # fmt: skip
        return tokens

    def step(rows: torch.Tensor, context: torch.Tensor, lengths: torch.Tensor) -> Accepted:
        tokens, given = drafted(design, shape, context), {}
        if samples:
            tokens = sampled(rows, context, lengths)
            given["draft_probs"] = recorded[tokens[:, :-1]]
            given["draft_probs"][:, DEPTH] = 1.0 / vocab  # of the padding node
        tree = build_tree(torch.tensor(SHAPES[shape], dtype=torch.int32).repeat(len(rows), 1), lengths, impl=impl)
        logits = design.logits[tokens]
        logits[:, padding] = torch.arange(vocab).float() * 2.0 - 9.0  # a row that must not be read
        sampling = SamplingTensors(temperature[rows], seeds=rows + first_seed, **chosen.arguments(len(rows)))
        return accept(rule, tokens, tree, logits, lengths, DEPTH + samples, sampling=sampling, impl=impl, **given)

    return emitted(step, len(temperature))


def emitted(take_step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Accepted], requests: int) -> torch.Tensor:
    """[requests, EMITTED] tokens of steps over (request ids, last tokens, lengths), from token 0 at position 3 on."""
    out = torch.full((requests, EMITTED), -1)
    rows = torch.arange(requests)  # requests that still need tokens
    context, written = torch.zeros_like(rows), torch.zeros_like(rows)
    lengths = torch.full_like(rows, 3)
    while len(rows):
        step = take_step(rows, context, lengths)
        for token in step.tokens.unbind(1):
            fits = (token >= 0) & (written < EMITTED)
            out[rows[fits], written[fits]] = token[fits]
            written = written + fits
        left = written < EMITTED
        rows, written, context = rows[left], written[left], step.bonus[left]
        lengths = step.new_lengths[left]
    return out


def joint_distribution(design: Design, temperature: float, chosen: Filter = OFF) -> torch.Tensor:
    """[V] * EMITTED float64: probability of each sequence after token 0."""
    steps = torch.softmax(design.logits.double() / temperature, -1)
    steps = torch.tensor([chosen(row) for row in steps.tolist()], dtype=torch.float64)
    joint = steps[0]
    for _ in range(EMITTED - 1):
        joint = joint[..., None] * steps
    return joint


def assert_distribution(tokens: torch.Tensor, design: Design, temperature: float, chosen: Filter = OFF) -> None:
    """Fail on an impossible token, and on a Pearson statistic that chance exceeds once in a million."""
    assert int(tokens.min()) >= 0 and int(tokens.max()) < design.vocab, "a token outside the vocabulary"
    if design.banned is not None:
        assert not (tokens == design.banned).any(), "a banned token was emitted"
    weights = design.vocab ** torch.arange(EMITTED - 1, -1, -1)
    observed = torch.bincount((tokens * weights).sum(-1), minlength=design.vocab**EMITTED).double()
    expected = joint_distribution(design, temperature, chosen).flatten() * len(tokens)
    assert not observed[expected == 0].any(), "a filtered or banned token was emitted"
    common = expected >= 5
    if expected[~common].sum() >= 5:
        observed = torch.cat([observed[common], observed[~common].sum()[None]])
        expected = torch.cat([expected[common], expected[~common].sum()[None]])
    else:
        observed, expected = observed[common], expected[common]
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    limit = chdtri(len(observed) - 1, ALPHA)
    assert statistic < limit, f"chi-square {statistic:.0f} over {limit:.0f} ({len(observed) - 1} degrees of freedom)"


def greedy_continuation(design: Design) -> torch.Tensor:
    """[EMITTED] tokens that follow token 0 at temperature 0."""
    tokens = [0]
    for _ in range(EMITTED):
        tokens.append(int(design.logits[tokens[-1]].argmax()))
    return torch.tensor(tokens[1:])
