"""Every algorithm with random models, and a way to make its drafts right."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from algorithms.algorithm import Algorithm, Batch, DraftTree
from algorithms.dflash.drafting import DFlash
from algorithms.eagle.config import Eagle3Config, EagleConfig
from algorithms.eagle.drafting import Eagle, Eagle3, NaiveEagle, PEagle
from algorithms.eagle.model import Eagle3Drafter, EagleDrafter
from algorithms.lookup import NGram, Suffix
from algorithms.mixed import Mixed
from algorithms.models.decoder import Decoder
from algorithms.models.loading import Target
from algorithms.mtp.config import MTPConfig
from algorithms.mtp.drafting import MTP
from algorithms.mtp.model import MTPHead
from algorithms.standalone import Standalone
from tests.algorithms.toy import CONFIG, DEEP_CONFIG, VOCAB, autoregressive, random_drafter, random_target, randomise

TARGET = random_target()
DEEP_TARGET = random_target(config=DEEP_CONFIG)
LOADING = "algorithms.models.loading"


def eagle_head(seed: int = 3) -> EagleDrafter:
    head = randomise(EagleDrafter(EagleConfig(replace(CONFIG, num_layers=1))), seed)
    head.bind(TARGET.model)
    return head


def eagle3_head(seed: int = 4, vocab: int = 37, layers: tuple[int, ...] = (-1, 0, 1)) -> Eagle3Drafter:
    """A head that knows every other token or so."""
    config = Eagle3Config(replace(CONFIG, num_layers=1), vocab, CONFIG.hidden_size, layers)
    head = randomise(Eagle3Drafter(config, CONFIG.num_layers), seed)
    known = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:vocab].sort().values
    head.set_vocabulary(known)
    head.bind(TARGET.model)
    return head


def peagle_head(seed: int = 6) -> Eagle3Drafter:
    """Two layers, and features of another number of target layers than EAGLE-3's."""
    config = Eagle3Config(
        replace(CONFIG, num_layers=2), 41, CONFIG.hidden_size, (-1, 1), feature_norm="joint", residual="normed",
        mask_token_id=VOCAB - 1,
    )  # fmt: skip
    head = randomise(Eagle3Drafter(config, CONFIG.num_layers, mask_shape=(1, 1, 2 * CONFIG.hidden_size)), seed)
    head.set_vocabulary(torch.arange(41) + (torch.arange(41) > 5) * (VOCAB - 41))
    head.mask_hidden.data = torch.randn(head.mask_hidden.shape, generator=torch.Generator().manual_seed(seed))
    head.bind(TARGET.model)
    return head


def mtp_head(seed: int = 7, layers: int = 2) -> MTPHead:
    head = randomise(MTPHead(MTPConfig(replace(CONFIG, num_layers=layers), hidden_in="raw"), CONFIG.num_layers), seed)
    head.bind(TARGET.model)
    return head


def draft_model(seed: int = 5, layers: int = 2) -> Target:
    config = replace(CONFIG, num_layers=layers)
    return Target(config, TARGET.path, randomise(Decoder(config), seed))


def blurred_target() -> Target:
    """A draft model that agrees with the target now and then."""
    blurred = random_target()
    noise = torch.Generator().manual_seed(9)
    for parameter in blurred.model.parameters():
        parameter.data += 0.03 * torch.randn(parameter.shape, generator=noise)
    return blurred


def load_random_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random drafters in place of folders."""
    heads = {"EAGLE": eagle_head, "EAGLE-3": eagle3_head, "P-EAGLE": peagle_head, None: eagle3_head}
    monkeypatch.setattr("algorithms.eagle.loading.load_eagle", lambda *arguments, **_: heads[arguments[-1]]())
    monkeypatch.setattr("algorithms.mtp.loading.load_mtp", lambda *_: mtp_head())
    monkeypatch.setattr(f"{LOADING}.load_draft", lambda *_: draft_model())
    monkeypatch.setattr("algorithms.dflash.loading.load_dflash", lambda *_: random_drafter())


def mixed(first: dict[str, Any], second: dict[str, Any]) -> Algorithm:
    return Mixed(Mixed.Config(first=first, second=second), TARGET, "random")


MAKERS: dict[str, Callable[[], Algorithm]] = {
    "eagle_chain": lambda: Eagle(Eagle.Config(steps=3), TARGET, "random"),
    "eagle_tree": lambda: Eagle(Eagle.Config(steps=3, topk=3, num_nodes=12), TARGET, "random"),
    "eagle3_chain": lambda: Eagle3(Eagle3.Config(steps=4), TARGET, "random"),
    "eagle3_tree": lambda: Eagle3(Eagle3.Config(steps=4, topk=2, num_nodes=9), TARGET, "random"),
    "naive_eagle": lambda: NaiveEagle(NaiveEagle.Config(), TARGET, "random"),
    "peagle_chain": lambda: PEagle(PEagle.Config(steps=5), TARGET, "random"),
    "peagle_tree": lambda: PEagle(PEagle.Config(steps=4, topk=2, num_nodes=9), TARGET, "random"),
    "mtp_tree": lambda: MTP(MTP.Config(steps=3, topk=2, num_nodes=7), TARGET, None),
    "standalone_chain": lambda: Standalone(Standalone.Config(steps=3), TARGET, "random"),
    "standalone_tree": lambda: Standalone(Standalone.Config(steps=3, topk=2, num_nodes=8), TARGET, "random"),
    "dflash_tree": lambda: DFlash(DFlash.Config(block_size=5, topk=3, num_nodes=11), TARGET, "random"),
    "dflash_window": lambda: DFlash(DFlash.Config(block_size=5, window=7), TARGET, "random"),
}
ALL_MAKERS = MAKERS | {
    "autoregressive": lambda: autoregressive(TARGET),
    "dflash_chain": lambda: DFlash(DFlash.Config(block_size=6), TARGET, "random"),
    "ngram": lambda: NGram(NGram.Config(num_nodes=9, histories=3), TARGET, None),
    "suffix": lambda: Suffix(Suffix.Config(num_nodes=9, histories=3), TARGET, None),
    "mixed": lambda: mixed({"name": "suffix", "num_nodes": 5, "histories": 2}, {"name": "dflash", "block_size": 5}),
    "suffix_own": lambda: Suffix(Suffix.Config(num_nodes=7, shared=False), TARGET, None),
}

TWINS = ("eagle_chain", "eagle3_tree", "naive_eagle", "peagle_chain", "standalone_chain", "dflash_chain", "suffix")
KINDS = [name for name in ALL_MAKERS if name not in TWINS]
"""One maker for every kind of state that a prompt fills, whatever shape is drafted from it."""


def hinted(algorithm: Algorithm, texts: Sequence[Sequence[int]]) -> Algorithm:
    """Write the tokens of `texts` on one path of each tree that `algorithm` drafts, wrong ones now and then.

    Random drafters are hardly ever right, so nearly all they draft would be rejected. The path follows the last child
    of every node, so what is accepted is scattered over the nodes of a tree. Cache, tree shape and everything learnt
    from what was accepted stay the algorithm's own.
    """
    propose, propose_few = algorithm.propose, algorithm.propose_few
    scripts = [list(text) for text in texts]

    def better(batch: Batch, draft: DraftTree) -> DraftTree:
        tokens = draft.tokens.tolist()
        first, sibling = draft.links.first_child.tolist(), draft.links.next_sibling.tolist()
        for row, (length, history) in enumerate(zip(batch.lengths.tolist(), batch.history.tolist(), strict=True)):
            committed = history[: length + 1]
            text = next((script for script in scripts if script[: length + 1] == committed), [])
            for depth, node in enumerate(_last_path(first[row], sibling[row]), start=1):
                if length + depth < len(text) and (length * 7 + depth * 3) % 5:
                    tokens[row][node] = text[length + depth]
        return replace(draft, tokens=torch.tensor(tokens))

    algorithm.propose = lambda batch: better(batch, propose(batch))  # type: ignore[method-assign]
    algorithm.propose_few = lambda batch, nodes: better(batch, propose_few(batch, nodes))  # type: ignore[method-assign]
    return algorithm


class Watched:
    """Records every draft of an algorithm: the text that it was made for, its tokens, and their depths."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.drafts: list[tuple[list[int], list[int], list[int]]] = []
        propose = algorithm.propose

        def watched(batch: Batch) -> DraftTree:
            draft = propose(batch)
            rows = zip(batch.lengths.tolist(), batch.history.tolist(), draft.tokens.tolist(), strict=True)
            depths = draft.links.depth.tolist()
            self.drafts += [(text[: n + 1], nodes, depths[i]) for i, (n, text, nodes) in enumerate(rows)]
            return draft

        algorithm.propose = watched  # type: ignore[method-assign]

    def by_text(self) -> dict[tuple[int, ...], list[int]]:
        """Tokens of the drafts by the text that they were made for."""
        return {tuple(text): tokens for text, tokens, _ in self.drafts}


def _last_path(first_child: Sequence[int], next_sibling: Sequence[int]) -> list[int]:
    """Nodes from a child of node 0 to a leaf, the last child each time."""
    path, node = [], first_child[0]
    while node >= 0:
        while next_sibling[node] >= 0:
            node = next_sibling[node]
        path.append(node)
        node = first_child[node]
    return path


def chi_square_p(exact: Mapping[Any, float], counts: Mapping[Any, int]) -> float:
    """Pearson's p-value of `counts` under the probabilities `exact`; cells that expect fewer than five are pooled."""
    assert set(counts) <= set(exact), "an outcome without a probability"
    total = sum(counts.values())
    cells = [(p * total, counts.get(outcome, 0)) for outcome, p in exact.items()]
    large, small = [c for c in cells if c[0] >= 5], [c for c in cells if c[0] < 5]
    assert len(large) >= 4
    pooled = large + ([(sum(e for e, _ in small), sum(o for _, o in small))] if small else [])
    return chi_square_tail(*torch.tensor(pooled, dtype=torch.float64).T)


def chi_square_tail(expected: Tensor, counts: Tensor) -> float:
    """Pearson's p-value of counts [N] whose expectations are `expected` [N]: scipy.stats is slow to import."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).to(statistic), statistic / 2))
