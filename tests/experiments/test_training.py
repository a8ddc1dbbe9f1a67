"""The training programs on a model of a few thousand weights: resuming, exporting, refusing; the block objective."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from tokenizers import Tokenizer

from algorithms.runtime.models.decoder import Decoder
from algorithms.runtime.models.dflash import DFlashDrafter
from algorithms.runtime.models.loading import load_dflash, load_target
from experiments import train_dflash as drafter_program
from experiments import train_target as target_program
from experiments.data import code
from experiments.training import corpus as corpus_module
from experiments.training.blocks import (
    IGNORED,
    BlockDrafter,
    block_labels,
    count_steps,
    draw_anchors,
    position_weights,
)
from experiments.training.generate import greedy
from experiments.training.loop import Trainer, TrainSettings, schedule
from experiments.training.mixer import DenseMixer, compile_layers, restore_layers
from experiments.training.responses import Continuation
from experiments.training.tokenizer import ASSISTANT, END, MASK, SPECIAL_TOKENS, USER, train_tokenizer

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 6


@pytest.fixture(autouse=True)
def _small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handful of files instead of the whole standard library, and one thread."""
    few = [code.stdlib_folder() / f"{name}.py" for name in ("abc", "contextlib", "queue", "copy")]
    for module in (corpus_module, drafter_program):
        monkeypatch.setattr(module, "training_files", lambda: few)
    monkeypatch.setattr("experiments.training.responses.training_files", lambda: few)
    monkeypatch.setattr(corpus_module, "TOKENIZER_SAMPLE_PROBLEMS", 100)


def _settings(**changes: object) -> TrainSettings:
    fields = {"max_minutes": None, "max_steps": STEPS, "threads": 1, "autocast": False} | changes
    return TrainSettings(**{"log_every_steps": 1, "eval_every_steps": 3} | fields)  # type: ignore[arg-type]


def _target_config(folder: Path, **changes: object) -> target_program.TrainTargetConfig:
    shape = target_program.ModelSettings(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=16
    )
    batch = target_program.BatchSettings(
        arithmetic_rows=1, drill_rows=1, arithmetic_length=384, code_rows=2, code_length=32
    )
    return target_program.TrainTargetConfig(str(folder), True, shape, batch, _settings(**changes))


def _drafter_config(target: Path, folder: Path, **changes: object) -> drafter_program.TrainDFlashConfig:
    return drafter_program.TrainDFlashConfig(
        target=str(target),
        out_dir=str(folder),
        drafter=drafter_program.DrafterSettings(num_layers=2, block_size=4, target_layer_ids=[1, 2]),
        responses=drafter_program.ResponseSettings(6, 3, 3, 12, 12, 3),
        batch=drafter_program.BlockBatchSettings(2, 3, 2, 3),
        train=_settings(**changes),
    )


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
        patch.setattr(target_program, "heldout_problems", lambda: target_program_problems()[:3])
        patch.setattr(target_program, "MAX_ANSWER_TOKENS", 8)
        target_program.train_target(_target_config(folder))
    return folder


target_program_problems = target_program.heldout_problems


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
        model = Decoder(target_program.decoder_config(config.model, 0))
        model.reset_parameters()
        corpus = corpus_module.Corpus(tokenizer, config.train.seed)
        objective = target_program.TargetObjective(model, corpus, config.batch, "cpu")
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


def test_drafter_trains_resumes_and_exports(shipped_shape: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter_program, "heldout_problems", lambda: target_program_problems()[:2])
        beginnings = code.function_beginnings(2)
        patch.setattr(drafter_program, "function_beginnings", lambda: beginnings)
        summary = drafter_program.train_dflash(_drafter_config(shipped_shape, whole))
        patch.setattr(Trainer, "run", _run_in_two_parts(Trainer.run))
        drafter_program.train_dflash(_drafter_config(shipped_shape, parts))
    assert _losses(whole) == _losses(parts)
    assert 1.0 <= summary["tokens_per_step_arithmetic"] <= 4.0
    target = load_target(shipped_shape, "cpu", torch.float32)
    drafter = load_dflash(whole, target, "cpu", torch.float32)
    assert drafter.config.mask_token_id == Tokenizer.from_file(str(whole / "tokenizer.json")).token_to_id(MASK)
    published = json.loads((whole / "config.json").read_text())
    assert published["dflash_config"]["target_layer_ids"] == [1, 2] and published["block_size"] == 4


def _run_in_two_parts(run):  # type: ignore[no-untyped-def]
    def interrupted(trainer: Trainer) -> None:
        run(trainer, 3)
        continued = Trainer(
            trainer.model, trainer.settings, trainer.folder, trainer.loss_of, trainer.evaluate
        )
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()  # only the checkpoint can bring the weights back
        assert continued.resume()
        run(continued)
        trainer.rows = continued.rows

    return interrupted


def _drafting(shipped_shape: Path) -> BlockDrafter:
    target = load_target(shipped_shape, "cpu", torch.float32).model
    settings = drafter_program.DrafterSettings(num_layers=2, block_size=4, target_layer_ids=[1, 2])
    drafter = DFlashDrafter(drafter_program.dflash_config(settings, target.config, 3))
    torch.manual_seed(1)
    drafter.reset_parameters()
    for layer in drafter.layers:
        torch.nn.init.normal_(layer.self_attn.o_proj.weight, std=0.2)
        torch.nn.init.normal_(layer.mlp.down_proj.weight, std=0.2)
    return BlockDrafter(target, drafter, 64, "cpu")


@torch.no_grad()
def test_a_block_sees_features_before_its_anchor_and_itself_only(shipped_shape: Path) -> None:
    drafting = _drafting(shipped_shape)
    tokens = torch.randint(4, 400, (1, 20), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([[6, 11]])
    before = drafting.hidden(tokens, anchors)
    later = tokens.clone()
    later[0, 7:] = 5  # everything after the first anchor
    torch.testing.assert_close(drafting.hidden(later, anchors)[0, 0], before[0, 0], atol=1e-5, rtol=1e-5)
    anchor = tokens.clone()
    anchor[0, 6] = 5
    assert (drafting.hidden(anchor, anchors)[0, 0] - before[0, 0]).abs().max() > 1e-3
    context = tokens.clone()
    context[0, 5] = 5
    assert (drafting.hidden(context, anchors)[0, 0] - before[0, 0]).abs().max() > 1e-3
    alone = drafting.hidden(tokens, anchors[:, 1:])
    torch.testing.assert_close(alone[0, 0], before[0, 1], atol=1e-5, rtol=1e-5)


def test_labels_stop_at_the_end_of_each_sequence() -> None:
    tokens = torch.arange(20).reshape(2, 10)
    labels = block_labels(tokens, torch.tensor([10, 6]), torch.tensor([[2, 8], [3, 4]]), 4)
    assert labels.tolist() == [[[3, 4, 5], [9, IGNORED, IGNORED]], [[14, 15, IGNORED], [15, IGNORED, IGNORED]]]


def test_anchors_lie_in_the_continuation_and_have_a_next_token() -> None:
    sequence = Continuation(list(range(12)), 7)
    anchors = draw_anchors([sequence], 200, random.Random(0))
    assert set(anchors.flatten().tolist()) == {7, 8, 9, 10}


def test_position_weights_decay_by_gamma() -> None:
    torch.testing.assert_close(position_weights(4, 7.0), torch.exp(-torch.arange(3) / 7.0))


@pytest.mark.parametrize(
    ("continuation", "drafts", "steps"),
    [
        ([1], [[9, 9]], 0),
        ([1, 2, 3], [[9, 9]] * 3, 2),
        ([1, 2, 3, 4], [[2, 3], [9, 9], [9, 9], [9, 9]], 1),
        ([1, 2, 3, 4, 5], [[2, 9], [9, 9], [4, 5], [9, 9], [9, 9]], 2),
        ([1, 2, 3], [[2, 3], [0, 0], [0, 0]], 1),
    ],
)
def test_count_steps_by_hand(continuation: list[int], drafts: list[list[int]], steps: int) -> None:
    assert count_steps(continuation, drafts) == steps


@torch.no_grad()
def test_batched_generation_equals_rereading_the_whole_text(shipped_shape: Path) -> None:
    model = load_target(shipped_shape, "cpu", torch.float32).model
    prompts = [[7, 8, 9], [20, 30, 40, 50, 60, 70], [5]]
    outputs = greedy(model, prompts, 6, stop=0)
    for prompt, output in zip(prompts, outputs, strict=True):
        text = list(prompt)
        for token in output:
            hidden, _ = model(torch.tensor([text]), DenseMixer(model.config, 32, "cpu"))
            assert int(model.logits(hidden[0, -1]).argmax()) == token
            text.append(token)
        assert len(output) == 6 or output[-1] == 0


@torch.no_grad()
def test_layers_shared_for_compilation_are_restored_for_generation(
    shipped_shape: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    model = load_target(shipped_shape, "cpu", torch.float32).model
    tokens = torch.tensor([[7, 8, 9, 10]])
    mixer = DenseMixer(model.config, 4, "cpu")
    written, (hidden, _) = greedy(model, [[7, 8, 9]], 6, stop=0), model(tokens, mixer)
    compile_layers(model)
    torch.testing.assert_close(model(tokens, mixer)[0], hidden)
    restore_layers(model)
    assert greedy(model, [[7, 8, 9]], 6, stop=0) == written


def test_schedule_warms_up_stays_and_falls_to_zero() -> None:
    settings = TrainSettings(warmup_fraction=0.1, decay_fraction=0.5)
    assert schedule(0.05, settings) == pytest.approx(0.5)
    assert schedule(0.3, settings) == 1.0
    assert schedule(0.75, settings) == pytest.approx(0.5)
    assert schedule(1.0, settings) == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_steps": None}, "max_minutes or train.max_steps"),
        ({"threads": 0}, "train.threads must be >= 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        Trainer(model, _settings(**changes), tmp_path, lambda step: (torch.zeros(()), 1), dict)


@pytest.mark.parametrize("name", ["train_target", "train_dflash"])
def test_configs_compose_and_refuse_misspelt_keys(name: str) -> None:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose(name, ["train.max_steps=3"])
        assert config.train.max_steps == 3
        assert not OmegaConf.missing_keys(config)
        defaults = asdict(TrainSettings())
        assert set(config.train) == set(defaults)
        with pytest.raises(ConfigCompositionException):
            compose(name, ["train.max_stepz=3"])
