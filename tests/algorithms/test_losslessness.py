"""Speculative output equals the target's own, token for token, whatever is drafted and however it is batched."""

from functools import cache

import pytest
import torch

from algorithms.algorithm import Observation
from algorithms.dflash.drafting import DFlash
from tests.algorithms.drafters import TARGET
from tests.algorithms.toy import Scripted, Setup, answers, autoregressive, changed, requests, run, scripts

pytestmark = pytest.mark.usefixtures("random_drafters")


@cache
def written(count: int, temperature: float = 0.0) -> list[list[int]]:
    return answers(requests(count, temperature=temperature), Setup(backend="torch", max_batch=1), TARGET)


def make_dflash(block_size: int) -> DFlash:
    return DFlash(DFlash.Config(block_size=block_size), TARGET, "random")


@pytest.mark.parametrize("reason", ["length", "stop_token"])
def test_end_at_each_position_of_a_block(reason: str) -> None:
    """Length limit and stop token fall on each place of a block of 7, the bonus token and its neighbours included."""
    asked, texts, ending = requests(3), scripts(requests(3), written(3)), []
    for end in (*range(1, 9), 14):
        for request, ids in zip(asked, written(3), strict=True):
            change = {"max_new_tokens": end} if reason == "length" else {"stop_token_ids": frozenset({ids[end - 1]})}
            ending.append(changed(request, id=len(ending), **change))
    alone = run(autoregressive(TARGET), ending, Setup(max_batch=9), TARGET).completions
    assert {c.finish_reason for c in alone} == {reason}
    for decoys in (False, True):
        drafted = run(Scripted(texts, 6, decoys=decoys), ending, Setup(max_batch=9), TARGET).completions
        for ours, plain in zip(drafted, alone, strict=True):
            assert (ours.token_ids, ours.text, ours.finish_reason) == (plain.token_ids, plain.text, reason)


@pytest.mark.parametrize(
    ("page_size", "drafts"), [(1, "chain"), (16, "chain"), (1, "tree"), (16, "none"), (16, "dflash")]
)
def test_kernels_in_the_engine(page_size: int, drafts: str) -> None:
    """The same identity through the Triton kernels (interpreted where there is no GPU). The last of three requests
    takes the row and the pages of the first one."""
    asked = [changed(request, max_new_tokens=(2, 5, 3)[request.id]) for request in requests(3)]
    expected = [ids[: r.sampling.max_new_tokens] for ids, r in zip(written(3), asked, strict=True)]
    setup = Setup(impl="triton", page_size=page_size, max_batch=2)
    if drafts == "none":
        algorithm = autoregressive(TARGET)
    elif drafts == "dflash":
        algorithm = make_dflash(4)
    else:
        algorithm = Scripted(scripts(asked, written(3)), 3, lambda at, d: (at + d) % 3 != 0, drafts == "tree")
    assert [c.token_ids for c in run(algorithm, asked, setup, TARGET).completions] == expected


@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
def test_observed_features_are_those_of_the_text(decoys: bool) -> None:
    """After any commit a drafter sees, for each position once, the hidden states the target has for that text."""

    class Recorder(Scripted):
        target_layers = (0, 1)

        def __init__(self, *args, **kwargs) -> None:
            super().__init__(*args, **kwargs)
            self.seen: dict[tuple[int, int], tuple[int, torch.Tensor]] = {}

        def observe(self, seen: Observation) -> None:
            joined = torch.cat(seen.features, -1)
            for row, pages in enumerate(seen.batch.page_table.tolist()):
                for column in range(int(seen.counts[row])):
                    key = (pages[0], int(seen.positions[row, column]))
                    assert key not in self.seen, f"position {key} observed twice"
                    self.seen[key] = (int(seen.tokens[row, column]), joined[row, column])

    asked = requests(3)
    texts = scripts(asked, written(3))
    plain = Recorder(texts, 0)
    drafted = Recorder(texts, 4, lambda at, d: (at + d) % 4 != 0, decoys)
    for recorder in (plain, drafted):
        run(recorder, asked, Setup(max_batch=3), TARGET)
    for text, length in ((t, len(t) - 1) for t in texts):
        pages = {page for (page, at), (token, _) in plain.seen.items() if at == 0 and token == text[0]}
        page = next(iter(pages))
        other = next(p for (p, at), (token, _) in drafted.seen.items() if at == 0 and token == text[0])
        for at in range(length):
            (token, alone), (drafted_token, found) = plain.seen[page, at], drafted.seen[other, at]
            assert token == drafted_token == text[at]
            torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-4)
