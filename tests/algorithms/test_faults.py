"""Faults stay where they happen: what one request leaves behind, or does wrong, changes no other."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import specdec_kernels as kernels
from algorithms.algorithm import Batch, DraftTree
from algorithms.attention.cache import KVCache
from algorithms.drafting import sampled_tree
from algorithms.models.loading import Target
from algorithms.standalone import Standalone
from specdec_kernels import Accepted, TreeLinks
from tests.algorithms.drafters import ALL_MAKERS, MAKERS, TARGET, TWINS, Watched
from tests.algorithms.toy import (
    VOCAB,
    Scripted,
    Setup,
    answers,
    autoregressive,
    changed,
    engine_of,
    requests,
    run,
    scripts,
)

pytestmark = pytest.mark.usefixtures("random_drafters")


def asked() -> list:
    return requests(4, max_new_tokens=6)


@cache
def expected() -> list[list[int]]:
    return answers(asked(), Setup(max_batch=1), TARGET)


def fill_with_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page of every pool holds NaN before its first use, as pages of a broken request would."""
    allocate = KVCache.allocate.__func__

    def poisoned(cls: type[KVCache], *arguments: object) -> KVCache:
        cache = allocate(cls, *arguments)
        cache.kv.fill_(float("nan"))
        return cache

    monkeypatch.setattr(KVCache, "allocate", classmethod(poisoned))


def served(maker: str, few: list, setup: Setup) -> tuple[list[list[int]], list]:
    """The answers and everything that was drafted on the way."""
    algorithm = ALL_MAKERS[maker]()
    watched = Watched(algorithm)
    return [c.token_ids for c in run(algorithm, few, setup, TARGET).completions], watched.drafts


@pytest.mark.parametrize(
    ("backend", "maker"), [("fa4", m) for m in MAKERS if m not in TWINS] + [("torch", "eagle3_tree"), ("fa4", "mixed")]
)
def test_nothing_is_read_before_it_is_written(monkeypatch: pytest.MonkeyPatch, backend: str, maker: str) -> None:
    """What stands in a recycled page behind the text reaches neither the answer nor the drafts."""
    setup = Setup(backend, page_size=4)
    answers, drafts = served(maker, asked(), setup)
    assert answers == expected()
    fill_with_nan(monkeypatch)
    assert served(maker, asked(), setup) == (answers, drafts)


@pytest.mark.parametrize("maker", ["eagle3_tree", "standalone_tree"])
def test_kernels_read_nothing_before_it_is_written(monkeypatch: pytest.MonkeyPatch, maker: str) -> None:
    """The same through the Triton kernels (interpreted where there is no GPU)."""
    few, setup = [changed(asked()[0], max_new_tokens=2)], Setup(impl="triton", max_batch=1)
    clean = served(maker, few, setup)
    assert clean[0] == [expected()[0][:2]]
    fill_with_nan(monkeypatch)
    assert served(maker, few, setup) == clean


def breaks_at(target: Target, poison: int) -> Target:
    """The same target with NaN for the token `poison`: a request that reads it has no finite logit from there on."""
    broken = copy.deepcopy(target)
    broken.model.model.embed_tokens.weight.data[poison] = float("nan")
    return broken


EAGER, CAPTURED, FUSED = Setup(page_size=4), Setup(graph="step", async_steps=1), Setup(fused=True)


@pytest.mark.parametrize(
    ("maker", "setup"),
    [
        ("autoregressive", CAPTURED),
        ("ngram", EAGER),
        ("standalone_chain", CAPTURED),
        ("standalone_chain", FUSED),
        ("dflash_chain", EAGER),
        ("dflash_chain", CAPTURED),
    ],
)
def test_a_request_without_finite_logits_ends_alone(maker: str, setup: Setup) -> None:
    """The others go on, also those that take its pages and its row."""
    few = requests(4, max_new_tokens=4)
    wanted, drafts = served(maker, few, setup)
    met = {token for _, tokens, _ in drafts for token in tokens} | {t for ids in wanted for t in ids}
    # A token that no other request reads, writes or drafts.
    poison = next(token for token in range(VOCAB) if token not in met and not any(token in r.prompt_ids for r in few))
    # In front, it follows nothing, so a drafter that learns from all texts never proposes it to another request.
    few[1] = replace(few[1], prompt_ids=(poison, *few[1].prompt_ids))
    engine = engine_of(ALL_MAKERS[maker](), setup, breaks_at(TARGET, poison))
    done = engine.generate(few).completions
    assert (done[1].finish_reason, done[1].token_ids) == ("error", [])
    assert "request 1: the target gave no finite logit" in done[1].error
    for place in (0, 2, 3):
        assert (done[place].token_ids, done[place].error) == (wanted[place], "")
    assert engine.scheduler.num_free_pages == engine.scheduler.num_pages
    assert all(cache.kv.isfinite().all() for cache in engine.parts.resources.caches)


def test_every_page_of_a_failed_request_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of a prompt of three pages breaks the keys and values of all of them."""
    poison, wanted = 7, requests(1, max_new_tokens=4)[0]
    long = replace(wanted, prompt_ids=(poison, *(token for token in range(8, 19))))
    engine = engine_of(autoregressive(TARGET), Setup(page_size=4, max_batch=1), breaks_at(TARGET, poison))
    broken: list[int] = []
    zero = KVCache.zero

    def noted(cache: KVCache, pages: list[int]) -> None:
        broken.append(int(cache.kv.isnan().any(-1).any(-1).any(-1).any(0).any(0).sum()))
        zero(cache, pages)

    monkeypatch.setattr(KVCache, "zero", noted)
    (done,) = engine.generate([long]).completions
    assert done.finish_reason == "error" and broken[0] >= 3
    assert all(cache.kv.isfinite().all() for cache in engine.parts.resources.caches)


def test_a_padding_row_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever acceptance says about it: its pages may be those of a request that has moved to another row."""
    accept = kernels.accept

    def generous(rule: str, tokens: Tensor, links: TreeLinks, *rest: object, **options: object) -> Accepted:
        accepted = accept(rule, tokens, links, *rest, **options)  # type: ignore[arg-type]
        padding = padded.pop() == 0
        nodes = torch.arange(accepted.nodes.shape[1], dtype=torch.int32) * 2
        return accepted._replace(
            num_accepted=torch.where(padding, 2, accepted.num_accepted).int(),
            nodes=torch.where(padding[:, None], nodes, accepted.nodes),
            tokens=torch.where(padding[:, None], 1, accepted.tokens),
        )

    few = requests(3, max_new_tokens=20)  # steps of four rows have padding, whose page is one of request 0
    wanted = answers(few, Setup(max_batch=1), TARGET)
    algorithm = Scripted(scripts(few, wanted), depth=3, decoys=True)
    padded: list[Tensor] = []
    propose = algorithm.propose

    def watched(batch: Batch) -> DraftTree:
        padded[:] = [batch.active.clone()]
        return propose(batch)

    monkeypatch.setattr(algorithm, "propose", watched)
    monkeypatch.setattr(kernels, "accept", generous)
    setup = Setup(max_batch=4, graph="step", async_steps=1, page_size=4)
    assert [c.token_ids for c in run(algorithm, few, setup, TARGET).completions] == wanted


@pytest.mark.parametrize("maker", ["eagle_chain", "eagle3_tree", "standalone_chain", "dflash_chain"])
def test_a_row_forgets_the_request_before(maker: str) -> None:
    """A prompt of one token is observed nowhere: its first draft is the one that it gets in a fresh row."""
    long, short = (replace(request, id=number) for number, request in enumerate(requests(7, max_new_tokens=4)[5:7]))
    assert len(short.prompt_ids) == 1
    _, alone = served(maker, [short], Setup(max_batch=1))
    _, behind = served(maker, [long, short], Setup(max_batch=1))
    assert behind[-len(alone) :] == alone


@pytest.mark.parametrize("topk", [1, 2])
def test_sampled_drafts_never_use_a_key_twice(monkeypatch: pytest.MonkeyPatch, topk: int) -> None:
    """One uniform for two drafts would couple them, also where they belong to different steps."""
    draw, keys = sampled_tree.sample_children, []

    def watched(tokens: Tensor, probs: Tensor, children: Tensor, *others: Tensor, **options: object) -> None:
        *_, seeds, positions = others
        nodes = children[children >= 0].tolist()
        keys.extend((*key, node) for key in zip(seeds.tolist(), positions.tolist(), strict=True) for node in nodes)
        draw(tokens, probs, children, *others, **options)

    monkeypatch.setattr(sampled_tree, "sample_children", watched)
    few = [changed(request, temperature=0.7) for request in requests(3, max_new_tokens=12)]
    drafter = Standalone(Standalone.Config(steps=4, topk=topk, draft_sampling="sample"), TARGET, "random")
    run(drafter, few, Setup(max_batch=3), TARGET)
    assert len(keys) > 60 and len(set(keys)) == len(keys)
