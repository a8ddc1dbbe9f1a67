"""The tiny target: standard-library source and arithmetic word problems, from scratch.

The summary holds the greedy accuracy of the rounded weights on the held-out problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from algorithms.engine.request import Request
from algorithms.models.config import DecoderConfig
from algorithms.models.decoder import Decoder, DecoderLayer
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.experts.module import Experts
from algorithms.models.loading import Target, load_target
from algorithms.models.loading.target import norm_offset
from algorithms.models.tokenizer import TOKENIZER_FILE
from algorithms.models.tokenizer import Tokenizer as ChatTokenizer
from algorithms.step.sampling_params import SamplingParams
from experiments.data.arithmetic import Problem, heldout_problems, parse_answer
from experiments.training import corpus as texts
from experiments.training.corpus import IGNORED, Corpus, Rows
from experiments.training.loop import Objective
from experiments.training.objectives.base import TrainingConfig
from experiments.training.parallel import Replicas
from experiments.training.served import Writer

MAX_ANSWER_TOKENS = 120
ANSWERS_AT_ONCE = 64


@dataclass
class ShapeSettings:
    """Shape of the target, by the names of `config.json`; `hf_keys` are further keys of its architecture."""

    model_type: str = "qwen3"
    hf_keys: Any = None
    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0


@dataclass
class RowSettings:
    """Rows of each kind in one step; every `long_code_every`-th step has half as many code rows of twice the length.

    Attention over long rows is the most expensive part of a step on a CPU, and few suffice to learn far positions. From
    step `focus_from_step` and the share `focus_from` of the run on, questions carry no loss and the answers' mean loss
    has the share `focus_weight`, because the gradients of a question's unpredictable numbers and names outweigh the
    answers'. `balance_weight` is the coefficient of the mean imbalance of layers with experts.
    """

    arithmetic_rows: int = 6
    drill_rows: int = 2
    arithmetic_length: int = 384
    code_rows: int = 4
    code_length: int = 512
    long_code_every: int = 4
    focus_from_step: int = 660
    focus_from: float = 0.0
    focus_weight: float = 0.7
    balance_weight: float = 0.01


@dataclass
class TargetTraining(TrainingConfig):
    shape: ShapeSettings = field(default_factory=ShapeSettings)
    batch: RowSettings = field(default_factory=RowSettings)

    def build(self, replicas: Replicas) -> TargetObjective:
        if replicas.world > 1:
            raise ValueError(f"drafter=target is trained by one process, got {replicas.world}")
        tokenizer = self._tokenizer()
        corpus = Corpus(tokenizer, self.train.seed)
        model = Decoder(decoder_config(self.shape, corpus.end))
        model.reset_parameters()
        model.to(self.train.device)
        if self.train.compile:
            compile_layers(model)
        return TargetObjective(model, corpus, self.batch, self.train.device)

    def _tokenizer(self) -> Tokenizer:
        """The tokenizer of a run that is resumed, or a new one."""
        folder = Path(self.out_dir)
        if self.resume and (folder / TOKENIZER_FILE).is_file():
            return Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        tokenizer = texts.train_tokenizer(texts.tokenizer_sample(self.train.seed), self.shape.vocab_size)
        texts.save_tokenizer(tokenizer, folder, self.shape.max_position_embeddings)
        return tokenizer


def decoder_config(settings: ShapeSettings, eos: int) -> DecoderConfig:
    """The shape that `settings` describe. Raises ValueError where the architecture cannot have it."""
    fixed = {"rms_norm_eps": 1e-6, "tie_word_embeddings": True, "eos_token_id": eos}
    config = DecoderConfig.from_hf(asdict(settings) | fixed | (settings.hf_keys or {}))
    config.to_hf()
    return config


class TargetObjective(Objective):
    """Next-token loss over a mixed batch, and the held-out losses of each kind of text."""

    title = "target"
    model: Decoder

    def __init__(self, model: Decoder, corpus: Corpus, batch: RowSettings, device: str) -> None:
        self.model, self.corpus, self.batch, self.device = model, corpus, batch, device
        self.user, self.assistant = (texts.token_id(corpus.tokenizer, each) for each in (texts.USER, texts.ASSISTANT))
        self.mixer = DenseMixer(model.config, max(batch.arithmetic_length, 2 * batch.code_length), device)
        rows = batch.arithmetic_rows + batch.drill_rows
        arithmetic = corpus.arithmetic_rows("loss", rows, batch.arithmetic_length, "heldout")
        self.heldout = {
            "heldout_arithmetic": arithmetic,
            "heldout_answers": self._focused(arithmetic),
            "heldout_code": corpus.code_rows("loss", batch.code_rows // 2, 2 * batch.code_length, "heldout"),
        }

    def _focused(self, rows: Rows) -> Rows:
        """The same rows with labels on answers only."""
        answers = (rows.inputs == self.assistant).int().cumsum(1) > (rows.inputs == self.user).int().cumsum(1) - 1
        return Rows(rows.inputs, torch.where(answers, rows.labels, IGNORED))

    def _imbalance(self) -> Tensor:
        """The mean over layers with experts, in the last forward; 0 without any."""
        layers = [module.imbalance for module in self.model.modules() if isinstance(module, Experts)]
        found = [each for each in layers if each is not None]
        return torch.stack(found).mean() if found else torch.zeros((), device=self.device)

    def _sums(self, *kinds: Rows) -> list[Tensor]:
        """The summed loss of each; rows of one length run through the model together."""
        if len(kinds) > 1 and len({rows.inputs.shape[1] for rows in kinds}) > 1:
            return [self._sums(rows)[0] for rows in kinds]
        hidden, _ = self.model(torch.cat([rows.inputs for rows in kinds]).to(self.device), self.mixer)
        labels = torch.cat([rows.labels for rows in kinds]).to(self.device)
        counted = labels != IGNORED
        logits = self.model.logits(hidden[counted]).float()
        losses = F.cross_entropy(logits, labels[counted], reduction="none")
        return [each.sum() for each in losses.split([rows.num_labels for rows in kinds])]

    def loss(self, number: int, progress: float) -> tuple[Tensor, int]:
        batch = self.batch
        rows, length = batch.code_rows, batch.code_length
        if number % batch.long_code_every == batch.long_code_every - 1:
            rows, length = max(1, rows // 2), 2 * length
        problems = self.corpus.arithmetic_rows(number, batch.arithmetic_rows, batch.arithmetic_length)
        drills = self.corpus.drill_rows(number, batch.drill_rows, batch.arithmetic_length)
        arithmetic = Rows(*map(torch.cat, zip(problems, drills, strict=True)))
        if focus := number >= batch.focus_from_step and progress >= batch.focus_from:
            arithmetic = self._focused(arithmetic)
        code = self.corpus.code_rows(number, rows, length)
        counts = arithmetic.num_labels, code.num_labels
        share = batch.focus_weight if focus else counts[0] / sum(counts)
        losses = self._sums(arithmetic, code)
        loss = share * losses[0] / counts[0] + (1 - share) * losses[1] / counts[1]
        return loss + batch.balance_weight * self._imbalance(), sum(counts)

    def held_out(self) -> Mapping[str, float]:
        """Loss per token on held-out problems (none of the evaluation set's) and held-out modules."""
        return {key: float(self._sums(rows)[0]) / rows.num_labels for key, rows in self.heldout.items()}

    def weights(self) -> dict[str, Tensor]:
        held = self.model.state_dict()
        return {name: weight - norm_offset(name, self.model.config) for name, weight in held.items()}

    def measure(self, folder: Path) -> dict[str, Any]:
        target = load_target(folder, self.device, torch.float32)
        return {"heldout_arithmetic_accuracy": arithmetic_accuracy(target, heldout_problems())}


def arithmetic_accuracy(target: Target, problems: list[Problem]) -> float:
    """Share of `problems` whose greedy answer is right."""
    tokenizer = ChatTokenizer.load(target.path)
    prompts = [tokenizer.encode_chat([problem.question]) for problem in problems]
    sampling = SamplingParams(max_new_tokens=MAX_ANSWER_TOKENS)
    requests = [Request(i, tuple(ids), sampling, tokenizer.eos_ids) for i, ids in enumerate(prompts)]
    writer = Writer(target, tokenizer, ANSWERS_AT_ONCE, max(request.max_length for request in requests))
    answers = writer.write(requests, "target answers")
    right = [parse_answer(tokenizer.decode(a)) == p.answer for a, p in zip(answers, problems, strict=True)]
    return sum(right) / len(right)


def compile_layers(model: Decoder) -> None:
    """Give all layers one compiled forward. `DenseMixer` uses the layer index for the window and the kind of mixing
    only, so layers that are equal in both share the index of the first one and with it one compilation."""
    compiled = torch.compile(DecoderLayer.forward, dynamic=False)
    config = model.config
    kinds = [(config.window(index), config.mixing(index)) for index in range(config.num_layers)]
    for layer, kind in zip(model.model.layers, kinds, strict=True):
        first = kinds.index(kind)
        layer.forward = lambda _, x, mixer, layer=layer, first=first: compiled(layer, first, x, mixer)  # type: ignore


SCHEMAS = {"target": TargetTraining}
