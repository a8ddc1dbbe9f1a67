"""The drafters' training text: the target's answers to prompts of every kind.

A drafter must agree with its target, so the labels are the target's own tokens, right or wrong. The text is written
once per target and settings, in shards, and serves all drafters: an interrupted run goes on with the first missing
shard, and a larger `count` appends. Several programs may fill one folder: a shard belongs to the program that holds the
lock on its `.lock` file, which the system releases when that program ends.
"""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import torch

from algorithms.engine.request import Request
from algorithms.models.loading import Target
from algorithms.models.tokenizer import Tokenizer
from algorithms.step.sampling_params import SamplingParams
from experiments.app.files import locked
from experiments.training.batches import Continuation, Text
from experiments.training.parallel import Replicas
from experiments.training.served import Writer
from experiments.training.text import prompt_sources
from experiments.training.text.prompt_sources import KindSettings, TextSettings

USED = "text.json"
FINGERPRINT_BYTES = 1 << 20


class TextSource:
    """The target's text of every kind, for training and for held-out figures. Raises ValueError or ModelError, before
    writing, where the folder's markup or the settings do not serve."""

    def __init__(self, target: Target, settings: TextSettings) -> None:
        if not settings.kinds:
            raise ValueError("text.kinds: expected at least one kind of text, got none; choose text=chat or text=tiny")
        self.target, self.settings = target, settings
        self.tokenizer = Tokenizer.load(target.path)
        self.vocab_size = target.config.vocab_size
        self._stop = prompt_sources.stop_ids(self.tokenizer)
        self._writer: Writer | None = None
        self._began = time.monotonic()
        weights = weights_fingerprint(target.path)
        self._folders = {name: self._folder(name, kind, weights) for name, kind in settings.kinds.items()}
        self._prompts: dict[str, prompt_sources.Take] = {
            name: prompt_sources.open_prompts(kind, self.tokenizer, settings.seed, settings.validation, self._write)
            for name, kind in settings.kinds.items()
        }

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest prompt and answer together."""
        kinds = self.settings.kinds.values()
        templated = [kind for kind in kinds if not kind.raw]
        opened = [len(self.tokenizer.encode(text)) for kind in templated for text in (*kind.openings, kind.template)]
        markup = len(self.tokenizer.encode_chat(["x"])) + max(opened) if templated else 0
        room = max(kind.turns * (kind.prompt_tokens + kind.answer_tokens + markup) for kind in kinds)
        return min(room, self.target.config.max_position_embeddings)

    def training(self, out_dir: Path, replicas: Replicas) -> Text:
        """Training text of all kinds, from files of earlier runs first. `out_dir` keeps the names of the shards, so
        that a resumed run learns from them."""
        listed = out_dir / USED
        wanted = [tuple(name) for name in json.loads(listed.read_text())] if listed.is_file() else self._shards()
        late = [(kind, name) for kind, name in wanted if not self._provide(kind, name, wait=False)]
        for kind, name in late:  # other programs write these now
            self._provide(kind, name, wait=True)
        replicas.wait()
        used = [(kind, name) for kind, name in wanted if self._file(kind, name).is_file()]
        texts = [Text.read(self._file(kind, name)) for kind, name in used]
        if not sum(map(len, texts)):
            raise ValueError("text: no shard has been written in text.minutes, or no prompt could be used")
        if replicas.is_first:
            listed.write_text(json.dumps(used))
        return Text.join(texts)

    def validation(self) -> dict[str, Text]:
        """Held-out text of each kind: none of its prompts is a training prompt or one of an evaluation set."""
        found = {}
        for kind in self._folders:
            self._provide(kind, prompt_sources.VALIDATION, wait=True)
            found[kind] = Text.read(self._file(kind, prompt_sources.VALIDATION))
        return {kind: text for kind, text in found.items() if len(text)}

    def close(self) -> None:
        """Free the engine's memory, and give the target back the forward that training differentiates."""
        self._writer = None
        self.target.model.set_forward(None)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _shards(self) -> list[tuple[str, str]]:
        """(kind, shard) in an order whose every prefix holds the kinds in their proportions."""
        placed = []
        for kind, settings in self.settings.kinds.items():
            for first in range(0, settings.count, self.settings.shard):
                end = min(first + self.settings.shard, settings.count)
                placed.append(((first + end) / settings.count, kind, f"{first:08d}-{end:08d}"))
        return [(kind, name) for _, kind, name in sorted(placed)]

    def _file(self, kind: str, name: str) -> Path:
        return self._folders[kind] / f"{name}.safetensors"

    def _provide(self, kind: str, name: str, wait: bool) -> bool:
        """Write a shard if it is missing and time is left; whether it is there afterwards."""
        file, minutes = self._file(kind, name), self.settings.minutes
        if name == prompt_sources.VALIDATION:
            split, first, end = prompt_sources.VALIDATION, 0, self.settings.validation
        else:
            split, (first, end) = prompt_sources.TRAINING, map(int, name.split("-"))
        if not file.is_file():
            with locked(file.with_suffix(".lock"), wait) as mine:
                in_time = minutes is None or time.monotonic() - self._began <= 60 * minutes
                # A program that was waited for may have written it.
                if mine and not file.is_file() and (split == prompt_sources.VALIDATION or in_time):
                    prompts = self._prompts[kind](split, first, end - first)
                    Text.of(self._conversed(kind, name, prompts), self.vocab_size).write(file)
        return file.is_file()

    def _conversed(self, kind: str, name: str, prompts: list[list[int]]) -> list[Continuation]:
        """Answers to `prompts` and to the turns that follow them, each after its whole conversation."""
        settings, source, label = self.settings.kinds[kind], self._prompts[kind], f"{kind} {name}"
        answered = self._answered(prompts, settings, label)
        found = list(answered)
        for turn in range(2, settings.turns + 1):
            assert isinstance(source, prompt_sources.SampledPrompts)  # the settings allow turns of no other source
            ended = [c.tokens for c in answered if c.tokens[-1] in self._stop]
            label = f"{kind} {name}, turn {turn}"
            answered = self._answered(source.follow(ended, label), settings, label)
            found += answered
        return found

    def _answered(self, prompts: list[list[int]], kind: KindSettings, label: str) -> list[Continuation]:
        base, limit = prompt_sources.seed_of(self.settings.seed, label), self.target.config.max_position_embeddings
        sampled = round(kind.sampled_share * len(prompts))
        prompts = [prompt for prompt in prompts if 1 <= len(prompt) <= limit - kind.answer_tokens]
        requests = [
            Request(
                id=number,
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(
                    max_new_tokens=kind.answer_tokens, temperature=float(number < sampled), seed=base + number
                ),
                eos_token_ids=self._stop,
            )
            for number, prompt in enumerate(prompts)
        ]
        answers = self._write(requests, f"target writes {label}") if requests else []
        return [Continuation(p + a, len(p)) for p, a in zip(prompts, answers, strict=True) if a]

    def _write(self, requests: Sequence[Request], label: str) -> list[list[int]]:
        fitting = [request for request in requests if request.max_length <= self.longest]
        if self._writer is None:
            self._writer = Writer(self.target, self.tokenizer, self.settings.batch, self.longest)
        answers = dict(zip([r.id for r in fitting], self._writer.write(fitting, label), strict=True)) if fitting else {}
        return [answers.get(request.id, []) for request in requests]

    def _folder(self, name: str, kind: KindSettings, weights: str) -> Path:
        """An existing folder per target, markup and setting that changes a shard."""
        settings = {key: value for key, value in asdict(kind).items() if key != "count"}
        if kind.path is not None:
            if not Path(kind.path).is_file():
                raise ValueError(f"text.kinds.{name}.path: expected a file, there is none at {kind.path}")
            settings["path"] = hashlib.sha256(Path(kind.path).read_bytes()).hexdigest()
        run = (self.settings.seed, self.settings.shard, self.settings.validation)
        markup = (self.tokenizer.fingerprint, self.tokenizer.template, sorted(self._stop))
        digest = hashlib.sha256(f"{sorted(settings.items())} {run} {markup} {weights}".encode()).hexdigest()
        folder = Path(self.settings.folder) / f"{name}-{digest[:16]}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def weights_fingerprint(folder: Path) -> str:
    """SHA-256 over the sizes, first and last megabytes of all weight files: distinguishes models in little time."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode() + file.read(FINGERPRINT_BYTES))
            file.seek(max(0, size - FINGERPRINT_BYTES))
            digest.update(file.read())
    return digest.hexdigest()
