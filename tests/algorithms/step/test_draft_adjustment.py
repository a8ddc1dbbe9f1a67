"""Drafts under penalties, logit bias and forbidden tokens: their logits, and what they gain."""

from typing import Any

import pytest
import torch

from algorithms.algorithm import Batch, DraftTree
from algorithms.dflash.config import SELECTOR, HeadConfig
from algorithms.dflash.drafting import DFlash
from algorithms.eagle.drafting import Eagle3, PEagle
from algorithms.standalone import Standalone
from algorithms.step.batch import DraftAdjustment, ForbiddenState, PenaltyState
from specdec_kernels import count_tokens
from tests.algorithms.drafters import TARGET
from tests.algorithms.reference_loop import forbidden, penalised
from tests.algorithms.toy import VOCAB, Setup, answers, changed, random_drafter, requests, run

pytestmark = pytest.mark.usefixtures("random_drafters")

PENALTIES: dict[str, Any] = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.8}
BIASED: dict[str, Any] = {"logit_bias": {3: 4.0, 17: -6.0, 40: 2.5}}
OUTPUTS = ([4, 9, 4], [60, 0])


@pytest.mark.parametrize("known", [None, torch.tensor([0, 3, 4, 9, 17, 40, 59, 60])])
def test_logits_are_changed_as_the_targets_are(known: torch.Tensor | None) -> None:
    """Against the definitions, one token at a time, for two requests and two columns."""
    ends = {"min_tokens": 4, "eos_token_ids": frozenset([59])}
    asked = [
        changed(requests(2)[0], bad_words=((9,), (3, 4), (0,)), **PENALTIES),
        changed(requests(2)[1], **BIASED, **ends, frequency_penalty=-1.0),
    ]
    penalties, banned = PenaltyState(2, VOCAB, torch.device("cpu")), ForbiddenState(2, torch.device("cpu"))
    for slot, (request, output) in enumerate(zip(asked, OUTPUTS, strict=True)):
        penalties.fill(slot, request)
        banned.fill(slot, request)
        row, num = penalties.output_counts[slot : slot + 1], torch.tensor([len(output)], dtype=torch.int32)
        count_tokens(row, torch.tensor([output]), num, impl="reference")
    lengths = torch.tensor([len(r.prompt_ids) + len(o) - 1 for r, o in zip(asked, OUTPUTS, strict=True)])
    kept = torch.arange(VOCAB) if known is None else known
    logits = torch.randn(2, 2, len(kept), generator=torch.Generator().manual_seed(1))
    found = logits.clone()
    adjust = DraftAdjustment(penalties, banned, slice(0, 2), lengths, VOCAB, "reference")
    adjust(found, 0, None if known is None else known - torch.arange(len(known)))
    for row, (request, output) in enumerate(zip(asked, OUTPUTS, strict=True)):
        for column in range(2):
            whole = torch.zeros(VOCAB, dtype=torch.float64)
            whole[kept] = logits[row, column].double()
            expected = penalised(whole, request, output)
            expected[list(forbidden(request, output))] = -torch.inf  # of these outputs none ends in a begun bad word
            torch.testing.assert_close(found[row, column].double(), expected[kept], atol=1e-6, rtol=1e-6)


def test_stop_tokens_are_drafted_once_the_output_is_long_enough() -> None:
    request = changed(requests(1)[0], min_tokens=3, eos_token_ids=frozenset([7]))
    banned = ForbiddenState(1, torch.device("cpu"))
    banned.fill(0, request)
    lengths = torch.tensor([len(request.prompt_ids)])  # one token is written: the next is the second, then the third
    adjust = DraftAdjustment(None, banned, slice(0, 1), lengths, VOCAB, "reference")
    seen = []
    for depth in range(4):
        logits = torch.zeros(1, 1, VOCAB)
        adjust(logits, depth)
        seen.append(bool(logits[0, 0, 7] == 0))
    assert seen == [False, False, True, True]


CHANGES: dict[str, dict[str, Any]] = {"bias": BIASED, "bad words": {"bad_words": ((27,), (30,), (46,))}}


@pytest.mark.parametrize("settings", [{}, {"rule": "block"}])
@pytest.mark.parametrize("change", CHANGES)
def test_a_perfect_drafter_stays_perfect(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], change: str
) -> None:
    """The target drafts for itself: every draft is accepted, since both change their logits alike."""
    monkeypatch.setattr("algorithms.models.loading.load_draft", lambda *_: TARGET)
    temperature = 1.0 if "rule" in settings else 0.0
    asked = [changed(r, temperature=temperature, **CHANGES[change]) for r in requests(3, 13)]
    plain = answers(asked, Setup(), TARGET)
    without = [changed(r, temperature=temperature) for r in requests(3, 13)]
    assert plain != answers(without, Setup(), TARGET), "the change has to matter"
    done = run(Standalone(Standalone.Config(steps=3, **settings), TARGET, "random"), asked, Setup(), TARGET).completions
    assert {count for c in done for count in c.accepted_counts} == {3}
    assert "rule" in settings or [c.token_ids for c in done] == plain


@pytest.mark.parametrize("kind", [Standalone, Eagle3, PEagle, DFlash])
@pytest.mark.parametrize("settings", [{}, {"topk": 2, "num_nodes": 5}])
def test_no_drafter_drafts_what_is_forbidden(kind: Any, settings: dict[str, Any]) -> None:
    """Of all drafters, chains and trees: none of the used nodes holds a token that every place forbids."""
    words = tuple((token,) for token in range(0, VOCAB, 3))
    asked = [changed(r, bad_words=words, **PENALTIES) for r in requests(3, 8)]
    depth = {"block_size": 4} if kind is DFlash else {"steps": 3}
    algorithm = kind(kind.Config(**depth, **settings), TARGET, "random")
    propose, drafted = algorithm.propose, set()

    def watched(batch: Batch) -> DraftTree:
        tree = propose(batch)
        drafted.update(tree.tokens[:, 1:][tree.links.depth[:, 1:] > 0].tolist())
        return tree

    algorithm.propose = watched
    done = run(algorithm, asked, Setup(), TARGET).completions
    assert drafted and not drafted & {word[0] for word in words}
    assert [c.token_ids for c in done] == answers(asked, Setup(), TARGET)


def test_a_selector_samples_inside_the_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """With top-k 1 its sampled chain is its greedy one, and has probability one."""
    drafter = random_drafter(block_size=4, head=HeadConfig(SELECTOR, 5, num_candidates=16))
    monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_: drafter)
    chains: dict[float, list[list[int]]] = {}
    for temperature in (0.0, 3.0):
        algorithm = DFlash(DFlash.Config(rule="block"), TARGET, "random")
        propose, found = algorithm.propose, chains.setdefault(temperature, [])

        def watched(batch: Batch, propose: Any = propose, found: list[list[int]] = found) -> DraftTree:
            tree = propose(batch)
            found.extend(tree.tokens.tolist())
            probs = tree.draft_probs
            assert probs is not None and torch.equal(probs.amax(-1), torch.ones_like(probs[..., 0]))
            return tree

        algorithm.propose = watched  # type: ignore[method-assign]
        one = changed(requests(1, 8)[0], temperature=temperature, top_k=1)
        run(algorithm, [one], Setup(), TARGET)
    assert chains[0.0] == chains[3.0]
