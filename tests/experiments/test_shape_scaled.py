"""A family at another shape: the small family's outputs and accepted drafts, the large family's sizes."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms.autoregressive import Autoregressive
from algorithms.dflash.drafting import DFlash
from algorithms.eagle.drafting import Eagle3
from algorithms.engine.request import Request
from algorithms.models.experts.module import Experts
from algorithms.models.loading import Target, load_target
from algorithms.models.tokenizer import Tokenizer
from algorithms.standalone import Standalone
from algorithms.step.sampling_params import SamplingParams
from experiments.app.schema import REPO_ROOT
from experiments.studies.shape_scaled import (
    ROUTINGS,
    SHAPES,
    ExpertShape,
    Family,
    Shape,
    ShapeScaledConfig,
    ShapeScaler,
    write_family,
)
from tests.algorithms.toy import Setup, run

SMALL = REPO_ROOT / "assets/tiny"
# Every dimension is larger than the tiny family's, none by the same factor.
OWN = Family(
    Shape(320, 832, 8, 9, 3, 128, 2304), Shape(192, 320, 5, 6, 2, 128, 2304), 4, 5, 1664, max_position_embeddings=1024
)
SHAPES |= {"test": OWN, "test_experts": replace(OWN, experts=ExpertShape(6, 2, 800))}
LONGEST = 1536  # positions, where the family has 1,024
FOLDERS = ("target", "draft", "dflash", "eagle3")
PROMPTS = ("Mia has 12 apples and buys 7 more. How many apples does she have?", "def add(a, b):")


@pytest.fixture(scope="module", params=["test", "test_experts"])
def large(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    out = tmp_path_factory.mktemp("scaled")
    own = dict(dtype="float32", device="cpu", max_position_embeddings=LONGEST)
    write_family(ShapeScaledConfig(shape=request.param, out=str(out), **own))
    return out


@cache
def small_target() -> Target:
    return load_target(SMALL / "target", "cpu", torch.float32)


@pytest.fixture(scope="module")
def target(large: Path) -> Target:
    return load_target(large / "target", "cpu", torch.float32)


KINDS: dict[str, tuple[Any, Any, str | None]] = {
    "autoregressive": (Autoregressive, Autoregressive.Config(), None),
    "dflash": (DFlash, DFlash.Config(), "dflash"),
    "eagle3": (Eagle3, Eagle3.Config(steps=3, topk=4, num_nodes=12), "eagle3"),
    "standalone": (Standalone, Standalone.Config(), "draft"),
}


def written(name: str, target: Target, family: Path) -> list[Any]:
    """Tokens and accepted drafts of each step, greedy and sampled."""
    kind, config, drafter = KINDS[name]
    tokenizer = Tokenizer.load(SMALL / "target")
    prompts = [tuple(tokenizer.encode_chat([text])) for text in PROMPTS]
    asked = [
        Request(index, prompt, SamplingParams(max_new_tokens=8, temperature=0.7 * (index % 2), seed=index))
        for index, prompt in enumerate(prompts * 2)
    ]
    algorithm = kind(config, target, drafter and str(family / drafter))
    done = run(algorithm, asked, Setup(backend="torch", max_batch=4, max_length=160), target)
    return [(completion.token_ids, completion.accepted_counts) for completion in done.completions]


@cache
def written_by_the_small_one(name: str) -> list[Any]:
    return written(name, small_target(), SMALL)


@pytest.mark.parametrize("name", KINDS)
def test_the_large_family_writes_what_the_small_one_writes(large: Path, target: Target, name: str) -> None:
    small = written_by_the_small_one(name)
    assert written(name, target, large) == small
    drafts = name != "autoregressive"
    assert not drafts or max(max(counts) for _, counts in small) > 0, "nothing is accepted: the test sees little"


def test_the_folders_have_the_named_sizes(large: Path, target: Target) -> None:
    family = SHAPES["test"]
    for name, shape in (("target", family.target), ("draft", family.draft)):
        assert Shape.of(json.loads((large / name / "config.json").read_text())) == shape
        assert (large / name / "tokenizer.json").read_bytes() == (SMALL / name / "tokenizer.json").read_bytes()
    configs = [json.loads((large / name / "config.json").read_text()) for name in FOLDERS]
    assert [config["max_position_embeddings"] for config in configs] == [LONGEST] * 4
    model = target.model
    for layer in model.model.layers:
        if isinstance(layer.mlp, Experts):
            check_experts(layer.mlp)
    first, last = (projections(model.model.layers[index].mlp) for index in (0, family.target.num_hidden_layers - 1))
    assert last[0].std() > 0 and not last[1].any()
    small = Shape.of(json.loads((SMALL / "target/config.json").read_text()))
    live = first[1]
    assert live.any() and not live[small.hidden_size :].any() and not live[:, small.intermediate_size :].any()


def projections(mlp: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Up and down of an MLP, or of its last expert."""
    if isinstance(mlp, Experts):
        return mlp.experts.gate_up_proj[-1], mlp.experts.down_proj[-1]
    return mlp.up_proj.weight, mlp.down_proj.weight


def check_experts(mlp: Experts) -> None:
    """All experts compute the same, each from memory of its own."""
    for weight in (mlp.experts.gate_up_proj, mlp.experts.down_proj):
        assert weight.is_contiguous() and (weight == weight[0]).all()


def test_routers_choose_as_they_are_named() -> None:
    """By codes: all experts alike. With preferences: some more than others. By the stream: like neighbours alike."""
    torch.manual_seed(0)
    small = Shape.of(json.loads((SMALL / "target/config.json").read_text()))
    large, count, topk, tokens = SHAPES["qwen3_30b_a3b"].target, 128, 8, 4000
    generator = torch.Generator().manual_seed(0)
    scaler = ShapeScaler(
        small, replace(large, vocab_size=tokens), 1e-6, torch.float32, torch.device("cpu"), generator, True
    )
    d = small.hidden_size
    stream = scaler.embedding(torch.randn(2048, d))[:2048]
    normed = stream / stream.square().mean(1, keepdim=True).sqrt()
    # The norm's weights give the small channels the small family's scale.
    normed[:, :d] *= (d / large.hidden_size) ** 0.5
    chosen = {name: (normed @ scaler.router(count, name).T).topk(topk).indices for name in ROUTINGS}
    spread = {name: torch.bincount(ids.flatten(), minlength=count).float().std() for name, ids in chosen.items()}
    expected = 2048 * topk / count
    assert spread["tokens"] < 0.35 * expected and spread["popular"] > 2 * spread["tokens"]
    skewed = torch.bincount((normed @ scaler.router(count, "popular", skew=3.0).T).topk(topk).indices.flatten())
    assert skewed.float().std() > 1.5 * spread["popular"]
    near = normed.clone()
    near[:, :d] += 0.3 * torch.randn(2048, d)
    router = scaler.router(count, "stream")
    pairs = [(each @ router.T).topk(topk).indices for each in (normed, near)]
    shared = (pairs[0][:, :, None] == pairs[1][:, None]).any(2).float().mean()
    assert shared > 5 * topk / count


def test_unused_tokens_never_win(target: Target) -> None:
    """Also where every logit of the small model is negative."""
    small, scaled = small_target().model, target.model
    width, vocab = small.config.hidden_size, small.config.vocab_size
    hidden = -small.logits(torch.eye(width)).mean(-1)  # a direction that all tokens dislike
    stream = torch.zeros(1, scaled.config.hidden_size)
    stream[:, :width] = 8 * hidden
    stream[:, width] = scaled.model.embed_tokens.weight[0, width]
    logits = scaled.logits(scaled.model.norm(stream))[0]
    assert (logits[vocab:].max() < logits[:vocab].min() - 50).item()


@pytest.mark.parametrize("name", SHAPES)
def test_the_tiny_family_fits_every_shape(name: str) -> None:
    generator = torch.Generator()
    for folder, shape in (("target", SHAPES[name].target), ("draft", SHAPES[name].draft)):
        small = Shape.of(json.loads((SMALL / folder / "config.json").read_text()))
        scaler = ShapeScaler(small, shape, 1e-6, torch.bfloat16, torch.device("cpu"), generator)
        places = scaler.query_heads()
        assert len(set(places)) == small.num_attention_heads and max(places) < shape.num_attention_heads
        assert 0 < scaler.large_eps < 1e-6


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    shape = SHAPES["test"].target
    build = dict(eps=1e-6, dtype=torch.float32, device=torch.device("cpu"), generator=torch.Generator())
    with pytest.raises(ValueError, match="hidden_size: expected more than the small family's 320, got 256"):
        ShapeScaler(shape, replace(shape, hidden_size=256), **build)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected heads that hold those of"):
        ShapeScaler(shape, replace(shape, hidden_size=640, head_dim=192), **build)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"family: expected a folder with model\.safetensors"):
        write_family(ShapeScaledConfig(shape="test", out=str(tmp_path), family=str(tmp_path)))
    with pytest.raises(ValueError, match="shape"):
        ShapeScaledConfig(shape="qwen3_800b")
