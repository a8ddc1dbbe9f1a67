"""The training program on a model of a few thousand weights: resuming, exporting, refusing; what the losses see."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from safetensors import SafetensorError
from tokenizers import Tokenizer

from algorithms.runtime.models.config import DFlashConfig
from algorithms.runtime.models.decoder import Decoder, MixerWeights
from algorithms.runtime.models.dense_mixer import DenseMixer, dense_attention
from algorithms.runtime.models.loading import load_dflash, load_draft, load_eagle, load_target
from algorithms.runtime.models.rope import apply_rope, rope_table
from experiments import train as program
from experiments.app import compose as app_compose
from experiments.app.errors import UserError
from experiments.app.schema import ModelConfig
from experiments.data import code
from experiments.training import corpus as corpus_module
from experiments.training.acceptance import Tally, leading_hits
from experiments.training.batches import ResponseSet, TrainingBatch, shifted
from experiments.training.features import FeatureScales
from experiments.training.loop import Trainer, TrainSettings, schedule
from experiments.training.losses import IGNORED
from experiments.training.model_folder import export_weights
from experiments.training.objectives import SCHEMAS
from experiments.training.objectives import target as target_module
from experiments.training.objectives.dflash import (
    BlockMixer,
    BlockObjective,
    BlockSettings,
    DFlashSettings,
    block_labels,
    draw_anchors,
)
from experiments.training.objectives.draft import DraftSettings
from experiments.training.objectives.drafter import BatchSettings, DrafterObjective, DrafterTraining
from experiments.training.objectives.eagle import ChainObjective, ChainSettings
from experiments.training.objectives.eagle3 import Eagle3Settings
from experiments.training.objectives.target import compile_layers
from experiments.training.parallel import Replicas
from experiments.training.served import EvaluationSettings
from experiments.training.text import prompts as prompts_module
from experiments.training.text.settings import KindSettings, TextSettings
from experiments.training.text.shards import Continuation, Text
from experiments.training.tokenizer import ASSISTANT, END, MASK, SPECIAL_TOKENS, USER, train_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 6
KINDS = {
    "arithmetic": KindSettings(source="arithmetic", count=6, answer_tokens=12),
    "windows": KindSettings(source="windows", raw=True, count=6, prompt_tokens=48, answer_tokens=12),
}


@pytest.fixture(autouse=True)
def _small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of files instead of the whole standard library, and one thread."""
    few = [code.stdlib_folder() / f"{name}.py" for name in ("abc", "contextlib", "queue", "copy")]
    for module in (corpus_module, prompts_module):
        monkeypatch.setattr(module, "training_files", lambda: few)
        monkeypatch.setattr(module, "heldout_files", lambda: few[:1])
    monkeypatch.setattr(corpus_module, "TOKENIZER_SAMPLE_PROBLEMS", 100)


def _settings(**changes: object) -> TrainSettings:
    fields = {"minutes": None, "steps": STEPS, "threads": 1, "autocast": False, "device": "cpu"} | changes
    return TrainSettings(**{"log_every_steps": 1, "eval_every_steps": 3} | fields)  # type: ignore[arg-type]


def _target_config(folder: Path, **changes: object) -> target_module.TargetTraining:
    shape = target_module.ShapeSettings(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=16
    )
    batch = target_module.RowSettings(
        arithmetic_rows=1, drill_rows=1, arithmetic_length=384, code_rows=2, code_length=32
    )
    return target_module.TargetTraining(out_dir=str(folder), train=_settings(**changes), shape=shape, batch=batch)


DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {
        "drafter": DFlashSettings(num_layers=2, block_size=4, target_layer_ids=[1, 2]),
        "blocks": BlockSettings(anchors=12),
    },
    "draft": {"drafter": DraftSettings(8, 16, 1, 1, 1)},
    "eagle": {"chain": ChainSettings(steps=3, feature_weight=0.5)},
    "eagle3": {
        "drafter": Eagle3Settings(draft_vocab_size=60, target_layer_ids=[0, 1, 3]),
        "chain": ChainSettings(steps=3),
    },
}


def _drafter_config(name: str, target: Path, folder: Path, **changes: object) -> DrafterTraining:
    return SCHEMAS[name](  # type: ignore[return-value]
        model=ModelConfig(name="local", path=str(target)),
        out_dir=str(folder),
        text=TextSettings(dict(KINDS), str(target.parent / "text"), validation=3, shard=4, batch=4),
        evaluation=EvaluationSettings(["arithmetic"], limit=2, max_new_tokens=6, batch=2),
        batch=BatchSettings(tokens=256, evaluation_tokens=128),
        train=_settings(**changes),
        **DRAFTERS[name],
    )


def _objective(name: str, shipped_shape: Path, folder: Path) -> DrafterObjective:
    folder.mkdir(exist_ok=True)
    torch.manual_seed(1)
    objective = _drafter_config(name, shipped_shape, folder).build(Replicas())
    _wake(objective.model)
    return objective


@torch.no_grad()
def _wake(drafter: torch.nn.Module) -> None:
    """Residual branches start at zero, which would hide what attention sees."""
    for name, parameter in drafter.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            torch.nn.init.normal_(parameter, std=0.2)


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "training.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def shipped_shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target trained for a few steps, in the layout of the shipped one."""
    folder = tmp_path_factory.mktemp("target")
    with pytest.MonkeyPatch.context() as patch:
        few = [code.stdlib_folder() / f"{name}.py" for name in ("abc", "contextlib", "queue", "copy")]
        patch.setattr(corpus_module, "training_files", lambda: few)
        patch.setattr(corpus_module, "TOKENIZER_SAMPLE_PROBLEMS", 100)
        patch.setattr(target_module, "heldout_problems", lambda: all_heldout_problems()[:3])
        patch.setattr(target_module, "MAX_ANSWER_TOKENS", 8)
        program.train(_target_config(folder))
    return folder


all_heldout_problems = target_module.heldout_problems


def test_loss_falls_and_the_log_has_held_out_losses(shipped_shape: Path) -> None:
    rows = [json.loads(line) for line in (shipped_shape / "training.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert {"heldout_arithmetic", "heldout_code"} <= rows[-1].keys()
    assert (shipped_shape / "training.svg").read_text().startswith("<?xml")


def test_interrupted_and_resumed_equals_uninterrupted(shipped_shape: Path, tmp_path: Path) -> None:
    config = _target_config(tmp_path)
    tokenizer = Tokenizer.from_file(str(shipped_shape / "tokenizer.json"))
    for stop_after in (2, None):
        torch.manual_seed(config.train.seed)
        model = Decoder(target_module.decoder_config(config.shape, 0))
        model.reset_parameters()
        corpus = corpus_module.Corpus(tokenizer, config.train.seed)
        objective = target_module.TargetObjective(model, corpus, config.batch, "cpu")
        trainer = Trainer(model, config.train, tmp_path, objective.loss, objective.held_out)
        assert trainer.resume() == (stop_after is None)
        trainer.run(stop_after)
    assert _losses(tmp_path) == _losses(shipped_shape)


def test_exported_target_gives_the_same_logits_in_transformers(shipped_shape: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(shipped_shape, dtype=torch.float32)
    ours = load_target(shipped_shape, "cpu", torch.float32).model
    tokens = torch.randint(4, 400, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, _ = ours(tokens, DenseMixer(ours.config, 20, "cpu"))
        torch.testing.assert_close(ours.logits(hidden), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_exported_tokenizer_applies_the_chat_template(shipped_shape: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(shipped_shape)
    turns = [{"role": "user", "content": "How many?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == f"{USER}How many?{ASSISTANT}"
    answered = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": "4"}], tokenize=False)
    assert answered == f"{USER}How many?{ASSISTANT}4{END}"
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    assert tokenizer.eos_token == END


def test_digits_are_tokens_of_their_own() -> None:
    tokenizer = train_tokenizer(["1234 5678 1234 5678 and some words, some more words"] * 50, 270)
    ids = tokenizer.encode("1234 words").ids
    assert [tokenizer.decode([i]) for i in ids[:4]] == list("1234")
    assert tokenizer.decode(tokenizer.encode("a = b[12]\n\tñ").ids) == "a = b[12]\n\tñ"


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_drafter_trains_resumes_and_exports(
    shipped_shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = program.train(_drafter_config(name, shipped_shape, whole))
    monkeypatch.setattr(Trainer, "run", _run_in_two_parts(Trainer.run))
    program.train(_drafter_config(name, shipped_shape, parts))
    assert _losses(whole) == _losses(parts)
    rows = [json.loads(line) for line in (whole / "training.jsonl").read_text().splitlines()]
    assert {"heldout_arithmetic", "tokens_per_step_windows"} <= rows[-1].keys()
    assert summary["best_step"] <= summary["steps"] == STEPS
    for method, tokens_per_step in summary["tokens_per_step"]["arithmetic"].items():
        assert 1.0 <= tokens_per_step <= int(method.split("_")[1]) + method.startswith(("chain", "tree"))
    target = load_target(shipped_shape, "cpu", torch.float32)
    loaders: dict[str, Callable[..., Any]] = {
        "dflash": load_dflash,
        "draft": load_draft,
        "eagle": load_eagle,
        "eagle3": load_eagle,
    }
    loaders[name](whole, target, "cpu", torch.float32)
    assert (whole / "training.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("parts", [{"own_mask": True}, {"markov_rank": 4}])
def test_parts_of_a_drafters_own_are_trained_exported_and_served(
    shipped_shape: Path, tmp_path: Path, parts: dict[str, Any]
) -> None:
    config = _drafter_config("dflash", shipped_shape, tmp_path, steps=2)
    config.drafter = DFlashSettings(num_layers=2, block_size=4, **parts)  # type: ignore[attr-defined]
    summary = program.train(config)
    drafter = load_dflash(tmp_path, load_target(shipped_shape, "cpu", torch.float32), "cpu", torch.float32)
    assert drafter.config.owns_mask == ("own_mask" in parts)
    own = drafter.mask_embedding if drafter.markov_head is None else drafter.markov_head.markov_w2.weight
    assert own is not None and own.abs().max() > 0
    assert min(summary["tokens_per_step"]["arithmetic"].values()) >= 1.0


def test_text_only_ends_before_training(shipped_shape: Path, tmp_path: Path) -> None:
    config = _drafter_config("dflash", shipped_shape, tmp_path / "out")
    config.text_only = True
    assert program.train(config)["continuations"] == 12
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["text.json"]
    with pytest.raises(ValueError, match="text_only"):
        program.train(replace(_target_config(tmp_path / "target"), text_only=True))


def test_best_model_is_what_is_exported(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    figures = iter([{"miss": 3.0}, {"miss": 1.0}, {"miss": 2.0}])
    seen: list[float] = []

    def evaluate() -> dict[str, float]:
        seen.append(float(model.weight))
        return next(figures)

    settings = _settings(steps=3, eval_every_steps=1)
    parts = lambda number: (model(torch.ones(1)).sum(), 1), evaluate, lambda found: found["miss"]  # noqa: E731
    trainer = Trainer(model, settings, tmp_path, *parts)
    trainer.run()
    assert trainer.restore_best() == 2 and float(model.weight) == seen[1] != seen[2]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(model, _settings(), tmp_path, lambda number: (model(torch.ones(1)).sum() * torch.nan, 1), dict)
    with pytest.raises(ValueError, match="the loss of steps 1 to 1 is not finite"):
        trainer.run()


def test_exported_dflash_names_its_mask_and_layers(shipped_shape: Path, tmp_path: Path) -> None:
    objective = _objective("dflash", shipped_shape, tmp_path)
    published = objective.hf_config()
    mask = Tokenizer.from_file(str(shipped_shape / "tokenizer.json")).token_to_id(MASK)
    assert published["dflash_config"] == {"mask_token_id": mask, "target_layer_ids": [1, 2]}
    assert published["block_size"] == 4


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_an_interrupted_training_says_what_is_kept(
    has_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`resume` is a switch here; in run.py it names a folder."""
    seen = []

    def interrupted(config: Any) -> None:
        seen.append(config.resume)
        raise KeyboardInterrupt

    if has_checkpoint:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "checkpoint.pt").write_bytes(b"")
    monkeypatch.setattr(program, "train", interrupted)
    monkeypatch.setattr(sys, "argv", ["train", "drafter=eagle3", f"out_dir={tmp_path / 'out'}", "resume=false"])
    with pytest.raises(SystemExit) as caught:
        program.main()
    kept = f"the last checkpoint is {tmp_path}" if has_checkpoint else "no checkpoint yet; text that was written whole"
    told = capsys.readouterr().err
    assert caught.value.code == 130 and seen == [False]
    assert kept in told and told.endswith("the same command goes on from there\n")


def _torch_on_a_full_disk() -> None:
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError:
        raise RuntimeError("[enforce fail] unexpected pos 8896 vs 8848")  # noqa: B904


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")), "the disk is full: make room for out_dir"),
        (_torch_on_a_full_disk, "the disk is full: make room for out_dir"),
        (Mock(side_effect=SafetensorError("I/O error: No space left on device (os error 28)")), "the disk is full"),
        (Mock(side_effect=RuntimeError("a bug")), None),
    ],
    ids=["system", "torch", "safetensors", "another"],
)
def test_a_full_disk_is_told_as_such(fails: Callable[[], None], told: str | None, tmp_path: Path) -> None:
    """The system's error, or that of a library, which has the system's behind it or quotes it."""
    kind = RuntimeError if told is None else UserError
    with patch.object(program, "train", lambda config: fails()), pytest.raises(kind, match=told or "a bug"):
        program.run(_target_config(tmp_path), OmegaConf.create())


def _run_in_two_parts(run):  # type: ignore[no-untyped-def]
    def interrupted(trainer: Trainer) -> None:
        run(trainer, 3)
        parts = trainer.model, trainer.settings, trainer.folder, trainer.loss_of, trainer.evaluate, trainer.score
        continued = Trainer(*parts)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()  # only the checkpoint can bring the weights back
        assert continued.resume()
        run(continued)
        trainer.rows, trainer.best, trainer.step = continued.rows, continued.best, continued.step

    return interrupted


@torch.no_grad()
def test_a_block_sees_features_before_its_anchor_and_itself_only(shipped_shape: Path, tmp_path: Path) -> None:
    drafting = _objective("dflash", shipped_shape, tmp_path)
    assert isinstance(drafting, BlockObjective)
    tokens = torch.randint(4, 400, (1, 20), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([[6, 11]])

    def hidden(tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return drafting.hidden(tokens, anchors, drafting.context(tokens))

    before = hidden(tokens, anchors)
    later = tokens.clone()
    later[0, 7:] = 5  # everything after the first anchor
    torch.testing.assert_close(hidden(later, anchors)[0, 0], before[0, 0], atol=1e-5, rtol=1e-5)
    anchor = tokens.clone()
    anchor[0, 6] = 5
    assert (hidden(anchor, anchors)[0, 0] - before[0, 0]).abs().max() > 1e-3
    context = tokens.clone()
    context[0, 5] = 5
    assert (hidden(context, anchors)[0, 0] - before[0, 0]).abs().max() > 1e-3
    alone = hidden(tokens, anchors[:, 1:])
    torch.testing.assert_close(alone[0, 0], before[0, 1], atol=1e-5, rtol=1e-5)


def test_block_attention_is_masked_attention_over_context_and_block() -> None:
    """Against one masked softmax over all columns; anchor 0 sees its own block alone."""
    batch, length, size, heads, kv_heads, width = 2, 7, 3, 6, 2, 8
    decoder = target_module.decoder_config(
        target_module.ShapeSettings(num_layers=1, num_heads=heads, num_kv_heads=kv_heads, head_dim=width), 0
    )
    config = DFlashConfig(decoder, size, (1,), 0, 4, (False,))
    anchors, generator = torch.tensor([[0, 4], [2, 7]]), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, batch, length, 1, kv_heads, width, generator=generator)
    q, k, v = (torch.randn(batch, 2 * size, n, width, generator=generator) for n in (heads, kv_heads, kv_heads))
    table = rope_table(decoder, length + 2 * size, "cpu")
    found = BlockMixer(config, keys, values, anchors, table)(0, q, k, v, MixerWeights())
    positions = (anchors[..., None] + torch.arange(size)).flatten(1)
    all_keys = torch.cat([apply_rope(keys[:, :, 0], table, torch.arange(length)), apply_rope(k, table, positions)], 1)
    before = (torch.arange(length) < anchors[..., None]).repeat_interleave(size, 1)
    own = torch.eye(2, dtype=torch.bool).repeat_interleave(size, 0).repeat_interleave(size, 1).expand(batch, -1, -1)
    visible = torch.cat([before, own], -1)[:, None]
    all_values = torch.cat([values[:, :, 0], v], 1)
    expected = dense_attention(apply_rope(q, table, positions), all_keys, all_values, visible, decoder)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_labels_stop_at_the_end_of_each_sequence() -> None:
    tokens = torch.arange(20).reshape(2, 10)
    labels = block_labels(tokens, torch.tensor([10, 6]), torch.tensor([[2, 8], [3, 4]]), 4)
    assert labels.tolist() == [[[3, 4, 5], [9, IGNORED, IGNORED]], [[14, 15, IGNORED], [15, IGNORED, IGNORED]]]


def _batch(rows: list[tuple[list[int], int]]) -> TrainingBatch:
    return _responses(rows).rows(np.arange(len(rows)))


def _responses(rows: list[tuple[list[int], int]], batch_tokens: int = 1000) -> ResponseSet:
    return ResponseSet(Text.of([Continuation(*row) for row in rows], 100), "cpu", batch_tokens)


def test_anchors_are_the_last_tokens_of_decoding_steps() -> None:
    """From the last prompt token, where decoding starts, to the last token that has one behind it."""
    batch = _batch([(list(range(12)), 7), (list(range(5)), 4)])
    anchors = draw_anchors(batch, 300, np.random.default_rng(0))
    assert [set(row.tolist()) for row in anchors] == [{6, 7, 8, 9, 10}, {3}]
    assert draw_anchors(batch, 5, np.random.default_rng(0))[0].tolist() == [6, 7, 8, 9, 10]


def test_batches_are_gathered_rows() -> None:
    responses = _responses([([5, 6, 7, 8], 2), ([9] * 40, 39), ([1, 2], 1)])
    batch = responses.rows(np.asarray([2, 0]))
    assert batch.tokens.shape == (2, 32) and batch.num_tokens == 1 + 2
    assert batch.tokens[:, :4].tolist() == [[1, 2, 0, 0], [5, 6, 7, 8]] and not batch.tokens[:, 4:].any()
    assert batch.continues(0)[:, :5].tolist() == [[False, True, False, False, False], [False, False, True, True, False]]
    assert batch.continues(1)[1, :5].tolist() == [False, True, True, False, False]
    assert batch.within.sum(1).tolist() == [2, 4]
    assert responses.token_counts(10).tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 1, 1]
    assert shifted(torch.arange(4)[None], 3).tolist() == [[3, 0, 0, 0]]
    assert shifted(torch.arange(4)[None], 9).tolist() == [[0, 0, 0, 0]]


def test_an_epoch_holds_every_row_once_in_batches_of_equal_length() -> None:
    lengths = [2 + 7 * i % 90 for i in range(50)]
    responses = _responses([([i + 1] * length, 1) for i, length in enumerate(lengths)], batch_tokens=256)
    for epoch in range(2):
        batches = [responses.batch(3, epoch * responses.num_batches + i) for i in range(responses.num_batches)]
        assert sorted(int(row[0]) for batch in batches for row in batch.tokens) == list(range(1, 51))
        assert all(batch.tokens.numel() <= 256 for batch in batches)
        again = responses.batch(3, epoch * responses.num_batches + 1)
        assert torch.equal(again.tokens, batches[1].tokens)
    assert sum(len(batch.tokens) for batch in responses.in_order()) == 50


@pytest.mark.parametrize(
    ("leading", "start", "draft_len", "tokens", "steps"),
    [
        ([0, 0, 0], 1, 2, 2, 2),
        ([0, 2, 9, 9], 2, 2, 2, 1),
        ([0, 2, 9, 9, 0, 9], 2, 2, 4, 2),
        ([0, 2, 9, 9, 0, 9], 2, 1, 4, 2),
        ([1, 0, 1, 0, 0], 1, 3, 4, 2),
    ],
    ids=["nothing right", "ends inside a draft", "a miss", "shorter drafts", "one each"],
)
def test_tally_by_hand(leading: list[int], start: int, draft_len: int, tokens: int, steps: int) -> None:
    tally = Tally(draft_len)
    tally.add(leading, start, len(leading))
    assert (tally.tokens, tally.steps) == (tokens, steps)


def test_hits_before_the_first_miss() -> None:
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert leading_hits(hits).tolist() == [2, 0, 4]


def _states_by_hand(objective: ChainObjective, tokens: torch.Tensor, last: int) -> list[torch.Tensor]:
    """What the head returns behind the token at `last`, each draft from the whole history: no cache, no unrolling.

    The drafts are the text's own tokens, as far as it goes.
    """
    drafter, target = objective.model, objective.target
    hidden, features = target(tokens[:, : last + 1], objective.mixer, drafter.capture)
    history = drafter.fuse(objective.scales(features), hidden)[:, :last]
    states = []
    for step in range(min(objective.chain.steps, tokens.shape[1] - last)):
        mixer = DenseMixer(drafter.config.decoder, tokens.shape[1] + 8, "cpu")
        states.append(drafter(tokens[:, 1 : last + 1 + step], history, mixer)[:, -1:])
        history = torch.cat([history, states[-1]], dim=1)
    return states


def _text_of_its_own(objective: ChainObjective, prompt: list[int], length: int) -> torch.Tensor:
    """`prompt` continued by the head's first drafts, so that some drafts are right; one token near the end is not."""
    drafter, row = objective.model, torch.tensor([prompt])
    for _ in range(length):
        state = _states_by_hand(objective, row, row.shape[1] - 1)[0][:, -1]
        row = torch.cat([row, drafter.to_target(drafter.logits(state).argmax(-1))[:, None]], dim=1)
    row[0, -3] = 9
    return row


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@torch.no_grad()
def test_unrolled_chains_are_decoding_steps(shipped_shape: Path, tmp_path: Path, name: str) -> None:
    objective = _objective(name, shipped_shape, tmp_path)
    assert isinstance(objective, ChainObjective)
    drafter, prompt = objective.model, list(range(10, 22))
    row = _text_of_its_own(objective, prompt, 8)
    hidden, features = objective.target(row, objective.mixer, drafter.capture)
    unrolled = objective.unroll(row, hidden, features)
    found = objective.leading(_batch([(row[0].tolist(), len(prompt))]))[0]
    accepted = []
    for last in range(len(prompt) - 1, row.shape[1] - 1):
        states = _states_by_hand(objective, row, last)
        for step, state in enumerate(states):
            torch.testing.assert_close(unrolled[step][:, last - 1], state[:, 0], atol=1e-4, rtol=1e-4)
        drafts = [int(drafter.to_target(drafter.logits(state).argmax(-1))) for state in states]
        text = row[0, last + 1 :].tolist()
        hits = [draft == token for draft, token in zip(drafts, text, strict=False)]
        accepted.append(int(leading_hits(torch.tensor(hits))))
        assert int(found[last]) == accepted[-1]
    assert max(accepted) >= 1 and min(accepted) == 0


@pytest.mark.parametrize("name", ["eagle3", "dflash"])
@torch.no_grad()
def test_folding_the_feature_scales_changes_nothing(shipped_shape: Path, tmp_path: Path, name: str) -> None:
    objective = _objective(name, shipped_shape, tmp_path)
    assert isinstance(objective, (ChainObjective, BlockObjective))
    layers, width = len(objective.scales.scales), objective.target.config.hidden_size
    assert layers == len(objective.model.fc.weight[0]) // width
    objective.scales = FeatureScales(torch.linspace(0.5, 7, layers * width).split(width))
    batch = _batch([(list(range(10, 30)), 8)])
    before, folded = objective.batch_loss(batch, np.random.default_rng(0)), objective.weights()
    assert not torch.equal(folded["fc.weight"], objective.model.fc.weight)
    objective.model.load_state_dict(folded)
    objective.scales = FeatureScales([torch.ones(width)] * layers)
    torch.testing.assert_close(objective.batch_loss(batch, np.random.default_rng(0)), before)


@pytest.mark.parametrize("name", list(DRAFTERS))
@torch.no_grad()
def test_training_starts_from_an_exported_drafter(shipped_shape: Path, tmp_path: Path, name: str) -> None:
    first = _objective(name, shipped_shape, tmp_path)
    if name in ("eagle3", "dflash"):
        sizes = [scale * 3 for scale in first.scales.scales]
        first.scales = FeatureScales(sizes)
    weights = {key: w.bfloat16().to(w.dtype) for key, w in first.weights().items()}
    export_weights(weights, first.hf_config(), tmp_path)
    config = _drafter_config(name, shipped_shape, tmp_path / "second")
    Path(config.out_dir).mkdir()
    config.start_from = str(tmp_path)
    second = config.build(Replicas())
    for key, weight in second.weights().items():
        torch.testing.assert_close(weight.float(), weights[key].float(), msg=key)
    shape = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(shape | {"intermediate_size": 7}))
    with pytest.raises(ValueError, match=r"start_from=.*: expected intermediate_size \d+, got 7"):
        config.build(Replicas())


@torch.no_grad()
def test_a_drafter_is_given_a_markov_head_later(shipped_shape: Path, tmp_path: Path) -> None:
    first = _objective("dflash", shipped_shape, tmp_path)
    export_weights(first.weights(), first.hf_config(), tmp_path)
    config: Any = _drafter_config("dflash", shipped_shape, tmp_path / "second")
    Path(config.out_dir).mkdir()
    config.start_from, config.drafter = str(tmp_path), replace(config.drafter, markov_rank=4)
    second = config.build(Replicas())
    assert second.model.markov_head.markov_w2.weight.abs().max() == 0, "it changes nothing before it is trained"
    batch = _batch([(list(range(10, 30)), 8)])
    before, after = (each.batch_loss(batch, np.random.default_rng(0)) for each in (first, second))
    torch.testing.assert_close(after, before, atol=0.02, rtol=0.01)  # weights were rounded to bfloat16
    config.start_from, config.drafter = str(tmp_path), replace(config.drafter, num_layers=3)
    with pytest.raises(ValueError, match="expected num_hidden_layers 3, got 2"):
        config.build(Replicas())


@pytest.mark.parametrize("name", list(DRAFTERS))
@torch.no_grad()
def test_loss_looks_at_continuations_only(shipped_shape: Path, tmp_path: Path, name: str) -> None:
    """Tokens behind the end of a row are padding, whatever they are."""
    objective = _objective(name, shipped_shape, tmp_path)
    batch = _batch([(list(range(10, 30)), 8), (list(range(40, 55)), 12)])
    junk = batch.tokens.clone()
    for row, length in zip(junk, batch.lengths.tolist(), strict=True):
        row[length:] = 77
    changed = TrainingBatch(junk, batch.lengths, batch.starts, batch.num_tokens)
    losses = [objective.batch_loss(b, np.random.default_rng(0)) for b in (batch, changed)]
    torch.testing.assert_close(losses[0], losses[1])
    assert losses[0] > 0


def test_draft_vocabulary_is_what_occurs_most(shipped_shape: Path, tmp_path: Path) -> None:
    objective = _objective("eagle3", shipped_shape, tmp_path)
    counts, drafter = objective.training.token_counts(400), objective.model
    ids = drafter.to_target(torch.arange(60))
    assert ids.tolist() == sorted(set(ids.tolist())) and int(drafter.t2d.sum()) == 60
    left_out = np.delete(counts, ids.numpy())
    assert counts[ids.numpy()].min() >= left_out.max()


def test_oversized_draft_is_refused(shipped_shape: Path, tmp_path: Path) -> None:
    config = _drafter_config("draft", shipped_shape, tmp_path)
    config.drafter = DraftSettings(32, 48, 4, 2, 1)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="at most a sixth"):
        program.train(config)


@torch.no_grad()
def test_layers_that_share_a_compilation_compute_the_same(shipped_shape: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    model = load_target(shipped_shape, "cpu", torch.float32).model
    tokens, mixer = torch.tensor([[7, 8, 9, 10]]), DenseMixer(model.config, 4, "cpu")
    hidden, names = model(tokens, mixer)[0], list(model.state_dict())
    compile_layers(model)
    torch.testing.assert_close(model(tokens, mixer)[0], hidden)
    assert list(model.state_dict()) == names


def test_schedule_warms_up_stays_and_falls_to_zero() -> None:
    settings = TrainSettings(warmup_fraction=0.1, decay_fraction=0.5)
    assert schedule(0.05, settings) == pytest.approx(0.5)
    assert schedule(0.3, settings) == 1.0
    assert schedule(0.75, settings) == pytest.approx(0.5)
    assert schedule(1.0, settings) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "train.minutes, train.steps: expected one of them"),
        ({"threads": 0}, "train.threads: expected at least 1 or null, got 0"),
        ({"steps": -1}, "train.steps: expected at least 1 or null, got -1"),
        ({"minutes": 0.0}, "train.minutes: expected above 0"),
        ({"decay_fraction": 0.0}, "train.decay_fraction: expected above 0"),
        ({"matrix_lr": float("nan")}, "train.matrix_lr: expected above 0"),
        ({"device": "gpu0"}, "train.device: expected auto, cpu or cuda, got 'gpu0'"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        Trainer(model, _settings(**changes), tmp_path, lambda step: (torch.zeros(()), 1), dict)


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_configs_compose_and_refuse_misspelt_keys(name: str) -> None:
    app_compose.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", [f"drafter={name}", "train.steps=3"])
        assert config.train.steps == 3
        assert not OmegaConf.missing_keys(config)
        assert isinstance(OmegaConf.to_object(config), SCHEMAS[name])
        defaults = asdict(TrainSettings())
        assert set(config.train) == set(defaults)
        with pytest.raises(ConfigCompositionException):
            compose("train", [f"drafter={name}", "train.stepz=3"])


@pytest.mark.parametrize("name", list(SCHEMAS))
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("+foo=1", ["unknown key 'foo'", "keys of a run: ", "out_dir"]),
        ("train.stepz=3", ["unknown key 'train.stepz'", "train.steps=…", "keys of train: "]),
        ("train.steps=-1", ["train.steps: expected at least 1 or null, got -1"]),
        ("train.threads=many", ["train.threads", "expected a whole number"]),
        ("out_dir=/proc/x", ["/proc/x", "out_dir"]),
    ],
)
def test_a_mistake_gets_one_screen(
    name: str, override: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    _refused([f"drafter={name}", override], expected, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("arguments", [[], ["drafter=eagel"]])
def test_a_missing_or_misspelt_drafter_gets_the_names(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    _refused(arguments, ["drafter", *SCHEMAS], tmp_path, monkeypatch, capsys)


def _refused(
    arguments: list[str], expected: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        program.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and told.startswith("error: ") and len(told.splitlines()) < 12
    for text in expected:
        assert text in told, told
    assert "algo" not in told and list(folder.iterdir()) == []


def test_a_program_prints_its_summary_and_tells_what_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    arguments = ["drafter=eagle", f"out_dir={tmp_path / 'out'}", "train.steps=3"]
    for target, told in (("local", "nowhere"), ("smollm2", "make smollm2")):
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments, f"model={target}", "model.path=nowhere"])
        with pytest.raises(SystemExit, match="2"):
            program.main()
        assert told in capsys.readouterr().err
    monkeypatch.setattr(program, "train", lambda settings: {"steps": settings.train.steps})
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    program.main()
    assert capsys.readouterr().out == "steps: 3\n"
