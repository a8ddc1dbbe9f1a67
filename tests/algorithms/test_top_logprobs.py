"""The likeliest tokens in the place of each: those of a forward over the whole text, whatever was drafted."""

from __future__ import annotations

import pytest
import torch

from algorithms.engine.request import Request
from tests.algorithms.drafters import ALL_MAKERS, TARGET, hinted
from tests.algorithms.reference_loop import following, penalised
from tests.algorithms.test_sampling_parameters import asked as all_parameters
from tests.algorithms.test_sampling_parameters import expected
from tests.algorithms.toy import VOCAB, Setup, autoregressive, changed, requests, run, scripts

pytestmark = pytest.mark.usefixtures("random_drafters")


def asked() -> list[Request]:
    """As many tokens as the request's number, so that requests of one step ask for different numbers of them."""
    return [changed(request, top_logprobs=request.id, logprobs=True) for request in all_parameters()]


@pytest.mark.parametrize(
    ("maker", "setup"),
    [
        ("autoregressive", Setup(page_size=4)),
        ("standalone_chain", Setup(page_size=4, graph="step", async_steps=1)),
        ("eagle3_tree", Setup(page_size=4, graph="step", async_steps=1)),
        ("ngram", Setup(page_size=4)),
    ],
)
def test_they_are_those_of_the_text(maker: str, setup: Setup) -> None:
    drafter = hinted(ALL_MAKERS[maker](), scripts(all_parameters(), [tokens for tokens, _ in expected()]))
    for request, completion in zip(asked(), run(drafter, asked(), setup, TARGET).completions, strict=True):
        tokens, count = completion.token_ids, request.sampling.top_logprobs
        assert tokens == expected()[request.id][0]
        assert len(completion.top_logprobs) == (len(tokens) if count else 0)
        for at, found in enumerate(completion.top_logprobs):
            row = penalised(following([*request.prompt_ids, *tokens[:at]]), request, tokens[:at]).log_softmax(-1)
            values, ids = row.topk(count)
            assert [token for token, _ in found] == ids.tolist()
            assert [value for _, value in found] == pytest.approx(values.tolist(), abs=1e-4)
            own = dict(found).get(tokens[at])
            assert own is None or own == pytest.approx(completion.logprobs[at], abs=1e-4)


def test_kernels_and_tokens_of_no_probability() -> None:
    """Forbidden tokens are left out; a likeliest token far above the others does not hide them."""
    few = ((5,), (6,), (7,))
    request = changed(requests(1, 2)[0], top_logprobs=VOCAB, bad_words=few, logit_bias={9: 300.0})
    (completion,) = run(autoregressive(TARGET), [request], Setup(impl="triton"), TARGET).completions
    for found in completion.top_logprobs:
        assert {token for token, _ in found} == {*range(VOCAB)} - {5, 6, 7} and found[0] == (9, pytest.approx(0.0))
        assert all(value > -float("inf") and value < -100 for _, value in found[1:])
    assert torch.isfinite(torch.tensor(completion.top_logprobs[0][-1][1]))
