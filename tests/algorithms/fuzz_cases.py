"""What a round of the fuzz draws: an algorithm, sizes and settings of an engine, and requests."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

from algorithms.algorithm import Algorithm
from algorithms.engine.request import Request
from algorithms.step.sampling_params import GrammarParams, SamplingParams
from tests.algorithms.drafters import ALL_MAKERS
from tests.algorithms.test_adaptive import CHEAP, DEAR
from tests.algorithms.test_constraints import END, NESTED, SCHEMA, grammars, in_nested, in_schema
from tests.algorithms.test_sampled_trees import TREES
from tests.algorithms.toy import VOCAB, Setup, spell

LONGEST = 56
"""Tokens of a request that fits the context."""
SAMPLED: dict[str, Callable[[], Algorithm]] = {f"sampled_{name}": make for name, make in TREES.items()}
"""Algorithms whose drafts are drawn."""
MAKERS = ALL_MAKERS | SAMPLED
BOOLEANS = {"type": "array", "items": {"type": "boolean"}}


def draw_setup(draw: random.Random, maker: str, constrained: bool) -> Setup:
    page_size = draw.choice((1, 3, 4, 16))
    graph = draw.choice(("none", "draft", "verify", "step"))
    return Setup(
        backend=draw.choice(("fa4", "torch", "hybrid")),
        page_size=page_size,
        max_batch=draw.randint(1, 5),
        num_pages=draw.choice((None, None, draw.randint(40, 200) // page_size + 1)),
        max_length=LONGEST,
        graph=graph,
        async_steps=draw.randint(0, 2),
        prefill_chunk=draw.choice((3, 8, 64)),
        prefill_tile=draw.choice((2, 4, 16)),
        mixed_prefill=draw.random() < 0.8,
        prefill_ahead=draw.choice((None, None, 0, 2)),
        fused=draw.random() < 0.2,
        adaptive=maker not in SAMPLED and graph in ("none", "step") and draw.random() < 0.3,
        step_costs=draw.choice((CHEAP, DEAR)),
        grammars=grammars() if constrained else None,
    )


def draw_regex(draw: random.Random) -> str:
    parts = draw.choices(("[a-d]", "[0-9]", "[a-z0-9]", "-", "(kit|kilo|moth)", "[A-C]"), k=draw.randint(1, 4))
    return "".join(part + draw.choice(("", "?", "+", "*", "{2}", "{1,3}")) for part in parts)


def draw_grammar(draw: random.Random) -> GrammarParams:
    kinds: tuple[dict[str, Any], ...] = (
        {"regex": draw_regex(draw)},
        {"regex": draw_regex(draw)},
        {"json_schema": draw.choice((SCHEMA, BOOLEANS)), "any_whitespace": draw.random() < 0.2},
        {"ebnf": NESTED},
    )
    return GrammarParams(**draw.choice(kinds), draft_forced=draw.random() < 0.8)


def in_grammar(grammar: GrammarParams, text: str) -> bool:
    """Whether `text` is in `grammar`, by other means than the library's."""
    if grammar.kind == "regex":
        return bool(re.fullmatch(grammar.text, text))
    if grammar.kind == "ebnf":
        return in_nested(text)
    if json.loads(grammar.text) == SCHEMA:
        return in_schema(text)
    return all(isinstance(value, bool) for value in json.loads(text))


def draw_sampling(draw: random.Random, constrained: bool) -> SamplingParams:
    """Mostly plain, sometimes at the ends of the ranges."""

    def sometimes(plain: Any, *others: Any) -> Any:
        return draw.choice(others) if draw.random() < 0.25 else plain

    text = spell(draw.choices(range(VOCAB), k=draw.randint(1, 3)))
    most = draw.randint(1, 44 if constrained else 20)
    words = [tuple(draw.choices(range(VOCAB), k=draw.randint(1, 3))) for _ in range(9)]
    least = sometimes(0, most, (most + 1) // 2)
    return SamplingParams(
        max_new_tokens=most,
        bad_words=sometimes((), tuple(words), tuple((token,) for token in range(1, VOCAB, 2))),
        min_tokens=0 if constrained else least,
        grammar=draw_grammar(draw) if constrained else GrammarParams(),
        temperature=draw.choice((0.0, 0.0, 0.7, 1.0, 3.0, 1e-4)),
        top_k=sometimes(0, 1, 5, VOCAB, 2**31 - 1),
        top_p=sometimes(1.0, 0.9, 0.3, 1e-6),
        min_p=sometimes(0.0, 0.05, 0.5, 1.0),
        repetition_penalty=sometimes(1.0, 0.5, 1.3, 5.0),
        presence_penalty=sometimes(0.0, -1.0, 0.6),
        frequency_penalty=sometimes(0.0, 0.4, -0.2),
        logit_bias=sometimes({}, {draw.randrange(VOCAB): 2.0}, {draw.randrange(VOCAB): -1e9}),
        seed=sometimes(draw.randrange(1000), 2**63 - 1),
        stop_strings=sometimes((), (text,), (text, spell([draw.randrange(VOCAB)]))),
        logprobs=draw.random() < 0.3,
        top_logprobs=sometimes(0, 1, 3),
    )


def draw_requests(draw: random.Random, constrained: bool) -> list[Request]:
    """Some requests, about half of them with a grammar if `constrained`."""
    return [_draw_request(draw, number, constrained and draw.random() < 0.5) for number in range(draw.randint(3, 9))]


def _draw_request(draw: random.Random, number: int, constrained: bool) -> Request:
    sampling = draw_sampling(draw, constrained)
    most = LONGEST - sampling.max_new_tokens
    length = draw.choice((1, 2, draw.randint(1, most), draw.randint(1, most)))
    if draw.random() < 0.08:
        length = most + draw.randint(1, 4)
    stops = frozenset(draw.choices(range(VOCAB), k=draw.choice((0, 0, 1, 2))))
    prompt = tuple(draw.choices(range(VOCAB), k=length))
    return Request(number, prompt, sampling, frozenset({END} if constrained else ()), stops)
