"""Each loss against its formula, spelled out in float64; gradients averaged over processes."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

from algorithms.dflash.config import GRU, HIDDEN, HIDDEN_AND_TOKEN, NEXT, SELECTOR, VANILLA, ConvConfig, HeadConfig
from algorithms.dflash.model import DFlashDrafter
from algorithms.eagle.model import Eagle3Drafter
from algorithms.models.loading import Target
from algorithms.parallel import collectives
from experiments.training.batches import Continuation, ResponseSet, Text, TrainingBatch
from experiments.training.corpus import IGNORED
from experiments.training.objectives import dflash
from experiments.training.objectives.block_settings import BlockSettings
from experiments.training.objectives.draft import DistillObjective, DistillSettings
from experiments.training.objectives.drafter import BatchSettings, DrafterTraining
from experiments.training.objectives.eagle import STEP_DISCOUNT, ChainObjective, ChainSettings, OnePassObjective
from experiments.training.parallel import Replicas
from tests.algorithms.drafters import TARGET, draft_model, eagle3_head, eagle_head, mtp_head
from tests.algorithms.toy import CONFIG, VOCAB, random_drafter, randomise

ROWS = [(list(range(3, 23)), 8), (list(range(40, 52)), 9), ([7, 9] * 8, 5)]
Floats = tuple[float, float]
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
"""Sums of some hundred float32 terms, against float64."""


@dataclass
class Stand:
    """What an objective reads of a `Setting`."""

    target: Target
    training: ResponseSet
    config: DrafterTraining
    device: str = "cpu"
    validation: tuple[()] = ()


def stand() -> Stand:
    TARGET.model.set_forward(None)  # whatever the last engine of another test has left
    text = Text.of([Continuation(*row) for row in ROWS], VOCAB)
    return Stand(TARGET, ResponseSet(text, "cpu", 1000), DrafterTraining(batch=BatchSettings()))


def batch_of(setting: Stand) -> TrainingBatch:
    return setting.training.rows(np.arange(len(ROWS)))


def log_softmax(logits: Tensor) -> list[float]:
    values = logits.double().tolist()
    top = max(values)
    total = top + math.log(sum(math.exp(value - top) for value in values))
    return [value - total for value in values]


def test_decay_weights() -> None:
    assert dflash.decay_weights(3, 7.0).tolist() == pytest.approx([1.0, math.exp(-1 / 7), math.exp(-2 / 7)])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_confidence_weights_are_suffix_sums_of_prefix_products(alpha: float) -> None:
    losses = torch.tensor([[0.1, 2.0, 0.7, 3.0], [1.0, 0.2, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    labelled = torch.tensor([[True] * 4, [True, True, False, False]])
    expected = []
    for row, marks in zip(losses.tolist(), labelled.tolist(), strict=True):
        smoothed = [(1 - alpha) * math.exp(-loss) + alpha for loss, mark in zip(row, marks, strict=True) if mark]
        products = [math.prod(smoothed[: m + 1]) for m in range(len(smoothed))]
        expected.append([sum(products[k:]) for k in range(4)])
    found = dflash.confidence_weights(losses, labelled, alpha)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert not found.requires_grad
    dflash.weighted_mean(losses, found).backward()
    torch.testing.assert_close(losses.grad, found / found.sum())


def test_a_batch_without_labels_has_no_loss() -> None:
    assert float(dflash.weighted_mean(torch.ones(3), torch.zeros(3))) == 0.0


FORMS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "markov": {"head": HeadConfig(VANILLA, 5)},
    "jetspec": {"causal_layers": (True, True)},
    "deepspec": {"slots": NEXT, "confidence": HIDDEN},
    "dspark": {"slots": NEXT, "head": HeadConfig(VANILLA, 5), "confidence": HIDDEN_AND_TOKEN},
    "domino": {"head": HeadConfig(GRU, 5, state_size=6, num_plain=1)},
    "domino_next": {"slots": NEXT, "head": HeadConfig(GRU, 5, state_size=6, num_plain=2)},
    "dflash2": {"head": HeadConfig(SELECTOR, 5, num_candidates=7), "conv": ConvConfig(2, 8), "logit_soft_cap": 3.0},
}
PROGRESS, UNTIL, SELECTOR_WEIGHT = 0.3, 0.5, 0.7
"""Domino's loss here is that of 0.6 of the way from the logits before its head to those after."""


def head_scores(drafter: DFlashDrafter, plain: Tensor, hidden: Tensor, text: list[int], label: int) -> Tensor:
    """Scores [V] of the draft after the `text` from the anchor on, whose logits before the head are `plain`."""
    head, gru, selector = drafter.markov_head, drafter.gru_head, drafter.candidate_selector
    if head is not None:
        return plain + head.markov_w2.weight.double() @ head.markov_w1.weight[text[-1]].double()
    if gru is not None and len(text) > gru.num_plain:
        cell = nn.GRUCell(CONFIG.hidden_size, gru.state_size, bias=False).double()
        cell.load_state_dict({f"weight_{n}": getattr(gru.prefix_gru, f"weight_{n}_l0") for n in ("ih", "hh")})
        state = None
        for token in text:
            state = cell(TARGET.model.model.embed_tokens.weight[token].double()[None], state)
        assert state is not None
        first, last = (weight.double() for weight in gru.embed_proj.parameters())
        return plain + last @ nn.functional.silu(first @ torch.cat([hidden.double(), state[0]]))
    if selector is not None:
        listed = plain.topk(7).indices.tolist()
        listed = listed if label in listed else [*listed[:-1], label]
        gate = selector.predecessor_codebook[text[-1]] * (selector.hidden_projection.weight @ hidden)
        pairs = selector.successor_codebook.double() @ gate.double()
        scores = torch.full_like(plain, -1e9)
        scores[listed] = 3 * torch.tanh(plain[listed] / 3) + pairs[listed]
        return scores
    return plain


def draft_loss(
    drafter: DFlashDrafter, share: float, hidden: Tensor, text: list[int], label: int, target: Tensor
) -> Floats:
    """Loss and cross entropy of the draft after the `text` from the anchor on, where the target's logits are
    `target [V]`."""
    plain = TARGET.model.logits(hidden).double()
    scores, head, confidence = (
        head_scores(drafter, plain, hidden, text, label), drafter.markov_head, drafter.confidence_head,
    )  # fmt: skip
    guessed, wanted = ([math.exp(value) for value in log_softmax(x)] for x in (scores, target))
    entropy, distance = -math.log(guessed[label]), sum(abs(p - q) for p, q in zip(wanted, guessed, strict=True))
    loss, before = entropy, -log_softmax(plain)[label]
    if drafter.gru_head is not None:
        loss = 0.6 * entropy + 0.4 * before
    if drafter.candidate_selector is not None:
        loss = SELECTOR_WEIGHT * entropy + before
    loss = share * loss + (1 - share) * distance
    if confidence is not None:
        e = None if head is None else head.markov_w1.weight[text[-1]].double()
        read = hidden.double() if e is None else torch.cat([hidden.double(), e])
        z = float(confidence.proj.weight[0].double() @ read + confidence.proj.bias.double())
        sure, accepted = 1 / (1 + math.exp(-z)), 1 - distance / 2
        loss -= accepted * math.log(sure) + (1 - accepted) * math.log(1 - sure)
    return loss, entropy


@pytest.mark.parametrize(("weights", "at_once"), [("decay", 1), ("confidence", 1000)], ids=["part by part", "at once"])
@pytest.mark.parametrize("form", list(FORMS))
def test_block_loss(weights: str, form: str, at_once: int) -> None:
    drafter = random_drafter(block_size=4, **FORMS[form]).requires_grad_(True)
    share, drafts = (0.1, 4) if FORMS[form].get("slots") else (1.0, 3)
    drafts, until = (3, UNTIL) if "domino" in form else (drafts, 0.0)
    setting = stand()
    blocks = BlockSettings(9, weights, gamma=3.0, alpha=0.25, token_share=share, at_once=at_once, plain_until=until)
    blocks.selector_weight = SELECTOR_WEIGHT
    objective = dflash.BlockObjective(drafter, setting, blocks)  # type: ignore[arg-type]
    batch = batch_of(setting)
    anchors = dflash.sample_anchors(batch, 3, np.random.default_rng(4))
    labels = dflash.block_labels(batch.tokens, batch.lengths, anchors, drafts)
    numerator = denominator = 0.0
    with torch.no_grad():
        final, features = objective.read_target(batch.tokens)
        hidden = objective.hidden(batch.tokens, anchors, objective.context(features))
        target = TARGET.model.logits(final)
        assert hidden.shape[2] == drafts
        for row, place in np.ndindex(*anchors.shape):
            anchor, found = int(anchors[row, place]), []
            for k in range(drafts):
                label, text = int(labels[row, place, k]), batch.tokens[row, anchor : anchor + k + 1].tolist()
                if label == IGNORED:
                    break
                draft = hidden[row, place, k], text, label, target[row, anchor + k]
                found.append(draft_loss(drafter, share, *draft))
            smoothed = [0.75 * math.exp(-entropy) + 0.25 for _, entropy in found]
            products = [math.prod(smoothed[: m + 1]) for m in range(len(smoothed))]
            for k, (loss, _) in enumerate(found):
                weight = math.exp(-k / 3.0) if weights == "decay" else sum(products[k:])
                numerator, denominator = numerator + weight * loss, denominator + weight
    loss = objective.batch_loss(batch, np.random.default_rng(4), PROGRESS)
    torch.testing.assert_close(loss.double().detach(), torch.tensor(numerator / denominator).double(), **TOLERANCE)
    loss.backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())


READING_LAYERS = partial(eagle3_head, layers=(0, 1))
"""Training reads the outputs of layers, and no embedding."""


def _reduced_peagle_head() -> Eagle3Drafter:
    """With two layers, and a part of the vocabulary."""
    config = replace(READING_LAYERS().config, decoder=replace(CONFIG, num_layers=2), mask_token_id=VOCAB - 1)
    head = randomise(Eagle3Drafter(config, CONFIG.num_layers, True, mask_shape=(1, 1, 2 * CONFIG.hidden_size)), 8)
    head.set_vocabulary(torch.arange(VOCAB - 37, VOCAB))
    head.mask_hidden.data = torch.randn(head.mask_hidden.shape, generator=torch.Generator().manual_seed(8))
    return head


CHAINS: dict[str, tuple[Any, Any]] = {
    "eagle": (eagle_head, ChainObjective),
    "eagle3": (READING_LAYERS, ChainObjective),
    "mtp": (lambda: mtp_head(layers=1), ChainObjective),
    "peagle": (_reduced_peagle_head, OnePassObjective),
}


@pytest.mark.parametrize("name", list(CHAINS))
@torch.no_grad()
def test_chain_loss(name: str) -> None:
    make, kind = CHAINS[name]
    drafter = make()
    drafter.bind(TARGET.model)
    setting, chain = stand(), ChainSettings(steps=3, feature_weight=0.5 if name == "eagle" else 0.0)
    objective = kind(name, drafter, setting, chain, None)
    batch = batch_of(setting)
    hidden, features = TARGET.model(batch.tokens, objective.mixer, drafter.target_layers)
    states, target = objective.unroll(batch.tokens, hidden, features), TARGET.model.logits(hidden)
    vocabulary = drafter.to_target(torch.arange(drafter.draft_vocab_size)).tolist()
    numerator = denominator = 0.0
    for row, (tokens, start) in enumerate(ROWS):
        for step, i in np.ndindex(3, len(tokens)):
            label = i + 2 + step
            if not start <= label < len(tokens) or tokens[label] not in vocabulary:
                continue
            wanted = log_softmax(target[row, label - 1, vocabulary])
            guessed = log_softmax(drafter.logits(states[step][row, i]))
            loss = -sum(math.exp(p) * q for p, q in zip(wanted, guessed, strict=True))
            distances = (states[step][row, i] - hidden[row, label - 1]).double().abs().tolist()
            smooth = [d - 0.5 if d >= 1 else 0.5 * d * d for d in distances]
            loss += chain.feature_weight * sum(smooth) / len(smooth)
            numerator, denominator = numerator + STEP_DISCOUNT**step * loss, denominator + STEP_DISCOUNT**step
    found = objective.batch_loss(batch, np.random.default_rng(0))
    torch.testing.assert_close(found.double(), torch.tensor(numerator / denominator).double(), **TOLERANCE)


@torch.no_grad()
def test_distillation_loss() -> None:
    setting, draft = stand(), draft_model().model
    objective = DistillObjective(draft, setting, DistillSettings(token_weight=0.3))  # type: ignore[arg-type]
    batch = batch_of(setting)
    logits = {model: model.logits(model(batch.tokens, objective.mixers[model])[0]) for model in (TARGET.model, draft)}
    total = count = 0.0
    for row, (tokens, start) in enumerate(ROWS):
        for label in range(start, len(tokens)):
            p, q = (log_softmax(logits[model][row, label - 1]) for model in (TARGET.model, draft))
            total += sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)) - 0.3 * q[tokens[label]]
            count += 1
    found = objective.batch_loss(batch, np.random.default_rng(0))
    torch.testing.assert_close(found.double(), torch.tensor(total / count).double(), **TOLERANCE)


def _replica(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/meeting", 2)
    group = dist.ProcessGroupGloo(store, rank, 2)
    torch.manual_seed(rank)
    model, replicas = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), Replicas(rank, 2, group, store)
    replicas.share(model)
    model[0](torch.full((1, 3), rank + 1.0)).sum().backward()  # the second layer has no gradient
    replicas.average(model.parameters())
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    clocks = [replicas.clock(step, 10.1 * step + rank) for step in range(3)]
    replicas.wait()
    assert not collectives.parallel(), "the engine of each process serves requests of its own"
    torch.save((clocks, model.state_dict(), gradients), f"{folder}/{rank}.pt")


def test_processes_share_weights_clock_and_mean_gradients(tmp_path: Path) -> None:
    processes.start_processes(_replica, (str(tmp_path),), nprocs=2, start_method="fork")
    (clocks, weights, gradients), others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert clocks == others[0] == [10.1 * step for step in range(3)]
    assert all(torch.equal(weight, others[1][name]) for name, weight in weights.items())
    assert all(map(torch.equal, gradients, others[2]))
    assert gradients[0].tolist() == [[1.5] * 3] * 2 and gradients[1].tolist() == [1.0, 1.0]
    assert not gradients[2].any()
