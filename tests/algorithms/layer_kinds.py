"""Random targets whose layers are not all attention and SwiGLU, and the check that drafts change nothing of what a
target writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from algorithms.algorithm import Algorithm
from algorithms.engine.request import Request
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.experts.config import ExpertsConfig
from algorithms.models.latent.config import LatentConfig
from algorithms.models.linear.config import LinearConfig
from algorithms.models.loading import Target
from tests.algorithms.tiny_folders import small_config
from tests.algorithms.toy import VOCAB, Scripted, Setup, answers, randomise, run, scripts

LATENT = LatentConfig(latent=32, nope=12, rope=16, value=10, query_rank=24, interleaved=True)
LINEAR = LinearConfig(key_heads=2, value_heads=4, key_dim=8, value_dim=16, taps=4)
EXPERTS = ExpertsConfig(num_experts=6, topk=2, width=24, renormalise=True)
SHARED = ExpertsConfig(num_experts=5, topk=2, width=16, renormalise=True, gated_shared=40)
GROUPED = ExpertsConfig(
    num_experts=8, topk=2, width=24, scoring="sigmoid", scale=1.5, groups=4, topk_groups=2, group_score="two_best",
    corrected=True, wide_router=True, shared=1,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "experts": dict(num_layers=3, mlps=(None, EXPERTS, EXPERTS)),
    "experts and latent": dict(num_layers=2, mixings=(LATENT,) * 2, mlps=(GROUPED,) * 2),
    "linear and attention": dict(
        num_layers=3, mixings=(LINEAR, None, LINEAR), gated_attention=True, architecture="qwen3_5_text"
    ),
    "linear, attention and experts": dict(
        num_layers=3, mixings=(LINEAR, None, LINEAR), mlps=(SHARED, SHARED, None), gated_attention=True,
        architecture="qwen3_next",
    ),
    "latent": dict(num_layers=2, mixings=(LATENT,) * 2),
    "latent and attention": dict(num_layers=3, mixings=(None, LATENT, None), sliding_windows=(6, None, None)),
}  # fmt: skip


def target_of(kind: str) -> Target:
    config: DecoderConfig = small_config(vocab_size=VOCAB, max_position_embeddings=128, eos_token_ids=(), **KINDS[kind])
    return Target(model=randomise(Decoder(config), 3), config=config, path=Path("toy"))


def check_text(target: Target, request: Request, written: Sequence[int]) -> None:
    """Each token is the most likely one of the plain definition, or within rounding of it."""
    text = torch.tensor([[*request.prompt_ids, *written]])
    hidden, _ = target.model(text, DenseMixer(target.config, text.shape[1], "cpu"))
    logits = target.model.logits(hidden)[0, len(request.prompt_ids) - 1 : -1]
    chosen = logits.gather(1, text[0, len(request.prompt_ids) :, None])[:, 0]
    assert (logits.max(1).values - chosen).max() < 1e-4 and logits.std() > 0.5


def check_drafts(
    target: Target,
    asked: Sequence[Request],
    setup: Setup,
    drafters: Sequence[Algorithm] = (),
    decoys: Sequence[bool] = (False, True),
) -> list[list[int]]:
    """What the target writes alone is what it writes with `drafters`, and with chains and trees of known outputs, wrong
    now and then, whose accepted paths have every length and are scattered over the nodes."""
    alone = answers(asked, setup, target)
    for request, written in zip(asked, alone, strict=True):
        check_text(target, request, written)
    texts = scripts(asked, alone)
    known = [Scripted(texts, 4, lambda at, depth: (at * 7 + depth * 3) % 5 != 0, each) for each in decoys]
    for drafter in (*known, *drafters):
        completions = run(drafter, asked, setup, target).completions
        assert [c.token_ids for c in completions] == alone, drafter.name
        assert drafter not in known or any(max(c.accepted_counts) for c in completions), "nothing was accepted"
    return alone
