"""Each loss against its formula, spelled out in float64; gradients averaged over processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

from algorithms.runtime import collectives
from algorithms.runtime.models.loading import Target
from experiments.training.batches import ResponseSet, TrainingBatch
from experiments.training.losses import IGNORED, confidence_weights, decay_weights, weighted_mean
from experiments.training.objectives.dflash import BlockObjective, BlockSettings, block_labels, draw_anchors
from experiments.training.objectives.draft import DistillObjective, DistillSettings
from experiments.training.objectives.drafter import BatchSettings, DrafterTraining
from experiments.training.objectives.eagle import STEP_DISCOUNT, ChainObjective, ChainSettings
from experiments.training.parallel import Replicas
from experiments.training.text.shards import Continuation, Text
from tests.algorithms.drafters import TARGET, draft_model, eagle3_head, eagle_head
from tests.algorithms.toy import VOCAB, random_drafter

ROWS = [(list(range(3, 23)), 8), (list(range(40, 52)), 9), ([7, 9] * 8, 5)]
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
    assert decay_weights(4, 7.0).tolist() == pytest.approx([1.0, math.exp(-1 / 7), math.exp(-2 / 7)])


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_confidence_weights_are_suffix_sums_of_prefix_products(alpha: float) -> None:
    losses = torch.tensor([[0.1, 2.0, 0.7, 3.0], [1.0, 0.2, 9.0, 9.0]], dtype=torch.float64, requires_grad=True)
    labelled = torch.tensor([[True] * 4, [True, True, False, False]])
    expected = []
    for row, marks in zip(losses.tolist(), labelled.tolist(), strict=True):
        smoothed = [(1 - alpha) * math.exp(-loss) + alpha for loss, mark in zip(row, marks, strict=True) if mark]
        products = [math.prod(smoothed[: m + 1]) for m in range(len(smoothed))]
        expected.append([sum(products[k:]) for k in range(4)])
    found = confidence_weights(losses, labelled, alpha)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert not found.requires_grad
    weighted_mean(losses, found).backward()
    torch.testing.assert_close(losses.grad, found / found.sum())


def test_a_batch_without_labels_has_no_loss() -> None:
    assert float(weighted_mean(torch.ones(3), torch.zeros(3))) == 0.0


@pytest.mark.parametrize("at_once", [1, 1000], ids=["part by part", "at once"])
@pytest.mark.parametrize("weights", ["decay", "confidence"])
@pytest.mark.parametrize("rank", [0, 5], ids=["", "markov"])
def test_dflash_loss(weights: str, rank: int, at_once: int) -> None:
    drafter = random_drafter(block_size=4, markov_rank=rank).requires_grad_(True)
    setting, blocks = stand(), BlockSettings(anchors=9, weights=weights, gamma=3.0, alpha=0.25, at_once=at_once)
    objective = BlockObjective(drafter, setting, blocks)  # type: ignore[arg-type]
    batch = batch_of(setting)
    anchors = draw_anchors(batch, 3, np.random.default_rng(4))
    labels = block_labels(batch.tokens, batch.lengths, anchors, 4)
    with torch.no_grad():
        hidden = objective.hidden(batch.tokens, anchors, objective.context(batch.tokens))
        logits = TARGET.model.logits(hidden)
    numerator = denominator = 0.0
    for row, place in np.ndindex(*anchors.shape):
        before, entropies = int(batch.tokens[row, anchors[row, place]]), []
        for k in range(3):
            label, scores = int(labels[row, place, k]), logits[row, place, k]
            if label == IGNORED:
                break
            if drafter.markov_head is not None:
                head = drafter.markov_head
                scores = scores + head.markov_w2.weight.detach() @ head.markov_w1.weight.detach()[before]
            entropies.append(-log_softmax(scores)[label])
            before = label
        smoothed = [0.75 * math.exp(-entropy) + 0.25 for entropy in entropies]
        products = [math.prod(smoothed[: m + 1]) for m in range(len(smoothed))]
        for k, entropy in enumerate(entropies):
            weight = math.exp(-k / 3.0) if weights == "decay" else sum(products[k:])
            numerator, denominator = numerator + weight * entropy, denominator + weight
    loss = objective.batch_loss(batch, np.random.default_rng(4))
    torch.testing.assert_close(loss.double().detach(), torch.tensor(numerator / denominator).double(), **TOLERANCE)
    loss.backward()
    assert all(parameter.grad is not None for parameter in drafter.parameters())


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@torch.no_grad()
def test_chain_loss(name: str) -> None:
    drafter = eagle_head() if name == "eagle" else eagle3_head()
    drafter.bind(TARGET.model)
    setting, chain = stand(), ChainSettings(steps=3, feature_weight=0.5 if name == "eagle" else 0.0)
    objective = ChainObjective(name, drafter, setting, chain, None)  # type: ignore[arg-type]
    batch = batch_of(setting)
    hidden, features = TARGET.model(batch.tokens, objective.mixer, drafter.capture)
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
    group = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/meeting", 2), rank, 2)
    torch.manual_seed(rank)
    model, replicas = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)), Replicas(rank, 2, group)
    replicas.share(model)
    model[0](torch.full((1, 3), rank + 1.0)).sum().backward()  # the second layer has no gradient
    clocks = replicas.average(model.parameters(), 10.0 + rank)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    clocks = [clocks, *(replicas.average(model.parameters(), time + rank) for time in (20.0, 30.0))]
    replicas.wait()
    assert not collectives.parallel(), "the engine of each process serves requests of its own"
    torch.save((clocks, model.state_dict(), gradients), f"{folder}/{rank}.pt")


def test_processes_share_weights_clock_and_mean_gradients(tmp_path: Path) -> None:
    processes.start_processes(_replica, (str(tmp_path),), nprocs=2, start_method="fork")
    (clocks, weights, gradients), (other_clocks, other_weights, others) = (
        torch.load(tmp_path / f"{rank}.pt") for rank in range(2)
    )
    assert clocks == other_clocks == [10.0, 10.0, 20.0], "each call but the first tells the clock of the call before"
    for name in weights:
        assert torch.equal(weights[name], other_weights[name])
    for mine, theirs in zip(gradients, others, strict=True):
        assert torch.equal(mine, theirs)
    assert gradients[0].tolist() == [[1.5] * 3] * 2 and gradients[1].tolist() == [1.0, 1.0]
    assert not gradients[2].any()
