"""The training program on a model of a few thousand weights: resuming, exporting, refusing; what the losses see."""

import errno
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors import SafetensorError

from algorithms.dflash.config import DFlashConfig
from algorithms.dflash.drafting import DFlash
from algorithms.dflash.loading import load_dflash
from algorithms.eagle.drafting import PEagle
from algorithms.eagle.loading import load_eagle
from algorithms.engine.request import Request
from algorithms.frontend import load_algorithm
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.layers import MixerWeights, apply_rope, plain_attention, rope_table
from algorithms.models.loading import load_draft, load_target
from algorithms.models.tokenizer import Tokenizer
from algorithms.mtp.drafting import MTP
from algorithms.mtp.loading import load_mtp
from algorithms.step.sampling_params import SamplingParams
from experiments import train as program
from experiments.app import compose as app_compose
from experiments.app.errors import UserError
from experiments.app.schema import ModelConfig
from experiments.data import code
from experiments.sweep import frame
from experiments.sweep.folder import SweepFolder
from experiments.training import corpus as corpus_module
from experiments.training.batches import Continuation, ResponseSet, Text, TrainingBatch, shifted
from experiments.training.corpus import ASSISTANT, END, IGNORED, SPECIAL_TOKENS, USER, train_tokenizer
from experiments.training.export import export_weights
from experiments.training.loop import Trainer, TrainSettings, schedule
from experiments.training.objectives import SCHEMAS, block_settings
from experiments.training.objectives import target as target_module
from experiments.training.objectives.dflash import BlockMixer, BlockObjective, block_labels, sample_anchors
from experiments.training.objectives.draft import DraftSettings
from experiments.training.objectives.drafter import (
    BatchSettings,
    DrafterObjective,
    DrafterTraining,
    leading_hits,
    num_steps,
)
from experiments.training.objectives.eagle import ChainObjective, ChainSettings, Eagle3Settings, PEagleSettings
from experiments.training.objectives.target import compile_layers
from experiments.training.parallel import Replicas
from experiments.training.served import EvaluationSettings, engine_of
from experiments.training.text import prompt_sources as prompts_module
from experiments.training.text.prompt_sources import KindSettings, TextSettings
from tests.experiments.forked import fork_workers

CONFIGS = Path(__file__).parents[2] / "configs"
STEPS = 6
KINDS = {
    "arithmetic": KindSettings(source="arithmetic", count=6, answer_tokens=12),
    "windows": KindSettings(source="windows", raw=True, count=6, prompt_tokens=48, answer_tokens=12),
}


@pytest.fixture(scope="module", autouse=True)
def _small_corpus() -> Iterator[None]:
    """A handful of files instead of the whole standard library."""
    few = [code.stdlib_folder() / f"{name}.py" for name in ("abc", "contextlib", "queue", "copy")]
    with pytest.MonkeyPatch.context() as patched:
        for module in (corpus_module, prompts_module):
            patched.setattr(module, "training_files", lambda: few)
            patched.setattr(module, "heldout_files", lambda: few[:1])
        patched.setattr(corpus_module, "TOKENIZER_SAMPLE_PROBLEMS", 100)
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_curves() -> Iterator[None]:
    """The curves of a target and of one drafter are drawn, once each."""
    draw, titles = program.plot_curve, []  # type: ignore[attr-defined]

    def drawn(rows: Any, path: Path, title: str) -> None:
        if title in titles or len(titles) == 2:
            path.write_text("<?xml")
        else:
            titles.append(title)
            draw(rows, path, title)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(program, "plot_curve", drawn)
        yield


def _settings(**changes: object) -> TrainSettings:
    fields = {"minutes": None, "steps": STEPS, "threads": 1, "autocast": False, "device": "cpu"} | changes
    return TrainSettings(**{"log_every_steps": 1, "eval_every_steps": 3} | fields)  # type: ignore[arg-type]


def _target_config(folder: Path, **changes: object) -> target_module.TargetTraining:
    shape = target_module.ShapeSettings(
        vocab_size=400, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    batch = target_module.RowSettings(
        arithmetic_rows=1, drill_rows=1, arithmetic_length=384, code_rows=2, code_length=32
    )
    return target_module.TargetTraining(out_dir=str(folder), train=_settings(**changes), shape=shape, batch=batch)


def _train_target(folder: Path, **shape: Any) -> Path:
    problems = target_module.heldout_problems(3)
    config = _target_config(folder)
    config.shape = replace(config.shape, **shape)
    with patch.multiple(target_module, heldout_problems=lambda: problems, MAX_ANSWER_TOKENS=8):
        program.train(config)
    return folder


SMALL: dict[str, Any] = {"num_layers": 2, "block_size": 4, "target_layer_ids": [1, 2]}
DRAFTERS: dict[str, dict[str, Any]] = {
    "dflash": {
        "drafter": block_settings.DFlashSettings(**SMALL, own_mask=True),
        "blocks": block_settings.BlockSettings(anchors=12),
    },
    "dflash2": {"drafter": block_settings.DFlash2Settings(rank=4, num_candidates=5, **SMALL)},
    "domino": {"drafter": block_settings.DominoSettings(rank=4, gru_size=6, **SMALL)},
    "dspark": {"drafter": block_settings.DSparkSettings(**SMALL, markov_rank=4)},
    "draft": {"drafter": DraftSettings(8, 16, 1, 1, 1)},
    "eagle": {"chain": ChainSettings(steps=3, feature_weight=0.5)},
    "eagle3": {
        "drafter": Eagle3Settings(draft_vocab_size=60, target_layer_ids=[0, 1, 3]),
        "chain": ChainSettings(steps=3),
    },
    "mtp": {"chain": ChainSettings(steps=3)},
    "peagle": {
        "drafter": PEagleSettings(draft_vocab_size=60, target_layer_ids=[0, 1, 3], num_layers=2),
        "chain": ChainSettings(steps=4),
    },
}


def _drafter_config(name: str, target: Path, folder: Path, **changes: object) -> DrafterTraining:
    return SCHEMAS[name](  # type: ignore[return-value]
        model=ModelConfig(name="local", path=str(target)),
        out_dir=str(folder),
        text=TextSettings(dict(KINDS), str(target.parent / "text"), validation=3, shard=4, batch=4),
        evaluation=EvaluationSettings(["arithmetic"], limit=1, max_new_tokens=6, batch=2),
        batch=BatchSettings(tokens=256, evaluation_tokens=128),
        train=_settings(**{"steps": 4, "eval_every_steps": 2} | changes),
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


def _log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]


def _losses(folder: Path) -> list[float]:
    return [row["loss"] for row in _log(folder)]


@pytest.fixture(scope="module")
def shipped_shape(tmp_path_factory: pytest.TempPathFactory, _small_corpus: None) -> Path:
    """A target trained for a few steps, in the layout of the shipped one."""
    return _train_target(tmp_path_factory.mktemp("target"))


def test_loss_falls_and_the_log_has_held_out_losses(shipped_shape: Path) -> None:
    rows = _log(shipped_shape)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    assert {"heldout_arithmetic", "heldout_code"} <= rows[-1].keys()
    assert (shipped_shape / "training.svg").read_text().startswith("<?xml")


def test_interrupted_and_resumed_equals_uninterrupted(
    shipped_shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _train_in_two_parts(monkeypatch, _target_config(tmp_path))
    assert _losses(tmp_path) == _losses(shipped_shape)


def test_exported_target_gives_the_same_logits_in_transformers(shipped_shape: Path) -> None:
    _check_logits(shipped_shape)


def _check_logits(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_target(folder, "cpu", torch.float32).model
    tokens = torch.randint(4, 400, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden, _ = ours(tokens, DenseMixer(ours.config, 20, "cpu"))
        torch.testing.assert_close(ours.logits(hidden), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
LINEAR = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "keys", "drafter"),
    [("qwen3_moe", EXPERTS, "dflash"), ("qwen3_5_text", LINEAR, "mtp")],
    ids=["experts", "linear"],
)
def test_targets_of_other_layers_and_their_drafters_are_trained(
    tmp_path: Path, model_type: str, keys: Any, drafter: str
) -> None:
    """They learn, are exported as transformers reads them, and a drafter learns from each."""
    target = _train_target(tmp_path / "target", model_type=model_type, hf_keys=keys)
    rows = _log(target)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    _check_logits(target)
    trained = torch.load(target / "checkpoint.pt", weights_only=True)["model"]
    for name, weight in load_target(target, "cpu", torch.float32).model.state_dict().items():
        torch.testing.assert_close(weight, trained[name], rtol=2**-7, atol=2**-8)
    summary = program.train(replace(_drafter_config(drafter, target, tmp_path / "drafter"), train=_settings(steps=2)))
    assert summary["tokens_per_step"]["arithmetic"] and summary["text_tokens"] > 0


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


RESUMED = ("domino", "draft", "eagle3", "peagle")
"""Of each kind of objective one; that of block drafters is the one whose loss changes with the training's progress."""
LEARNING = ("dflash2", "mtp")
"""Trained for long enough that drafts are accepted by the engine; of 400 tokens chance would hit one in 400 steps."""


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_drafter_trains_resumes_and_exports(
    shipped_shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole, parts, steps = tmp_path / "whole", tmp_path / "parts", 48 if name in LEARNING else 4
    budget = {"steps": steps, "eval_every_steps": steps // 2}
    config = _drafter_config(name, shipped_shape, whole, **budget)
    if name in LEARNING:
        config.evaluation = EvaluationSettings(limit=2, max_new_tokens=10, batch=2)
    summary = program.train(config)
    if name in RESUMED:
        _train_in_two_parts(monkeypatch, _drafter_config(name, shipped_shape, parts, **budget))
        assert _losses(whole) == _losses(parts)
    assert {"heldout_arithmetic", "tokens_per_step_windows"} <= _log(whole)[-1].keys()
    assert summary["best_step"] <= summary["steps"] == steps
    measured = summary["tokens_per_step"]
    for method, tokens_per_step in [pair for found in measured.values() for pair in found.items()]:
        least = 1.3 if name in LEARNING else 1.0
        most = int(method.split("_")[1]) + (name == "dspark" or method != "block_4")
        assert least <= tokens_per_step <= most, measured
    target = load_target(shipped_shape, "cpu", torch.float32)
    loaders: dict[str, Callable[..., Any]] = {"draft": load_draft, "mtp": load_mtp}
    loaders |= dict.fromkeys(("dflash", "dflash2", "domino", "dspark"), load_dflash)
    kinds = ("P-EAGLE",) if name == "peagle" else ()
    drafter = loaders.get(name, load_eagle)(whole, target, *kinds)
    if name in ("dflash", "dspark"):  # they have a mask or a Markov head of their own
        own = drafter.mask_embedding if name == "dflash" else drafter.markov_head.markov_w2.weight
        assert own.abs().max() > 0
    assert (whole / "training.svg").read_text().startswith("<?xml")


BLOCKS: dict[str, block_settings.ShapeSettings] = {
    "own": block_settings.DFlashSettings(**SMALL),
    "causal": block_settings.DFlashSettings(**SMALL, causal=True, own_mask=True),
    "next": block_settings.DFlashSettings(**SMALL, slots="next", confidence_head=True),
    "dspark": block_settings.DSparkSettings(**SMALL, markov_rank=4),
    "domino": block_settings.DominoSettings(rank=4, gru_size=6, **SMALL),
    "domino_next": block_settings.DominoSettings(rank=4, gru_size=6, num_plain=2, slots="next", **SMALL),
    "dflash2": block_settings.DFlash2Settings(rank=4, num_candidates=5, **SMALL),
}
CHAINS = {"peagle": PEagle, "mtp": MTP}


@pytest.mark.parametrize("form", [*BLOCKS, *CHAINS])
@torch.no_grad()
def test_trained_drafts_are_those_of_the_engine(
    shipped_shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The engine drafts from the exported folder what the objective does, and drafts change no output."""
    kind: Any = CHAINS.get(form, DFlash)
    if form in BLOCKS:
        monkeypatch.setitem(DRAFTERS, "dflash", {"drafter": BLOCKS[form]})
    objective: Any = _objective(form if form in CHAINS else "dflash", shipped_shape, tmp_path)
    if objective.scales is not None:
        objective.scales = objective.scales.log2().round().exp2()  # exact in bfloat16
    for parameter in objective.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim == 2 else None
        parameter.copy_(parameter.bfloat16())
    export_weights(objective.weights(), objective.hf_config(), tmp_path)
    seen, propose = [], kind.propose

    def spied(algorithm: Any, batch: Any) -> Any:
        tree = propose(algorithm, batch)
        seen.append((int(batch.lengths), tree.tokens[0].tolist()))
        return tree

    monkeypatch.setattr(kind, "propose", spied)
    row = _answer(shipped_shape, kind.Config(**({"steps": objective.draft_len} if form in CHAINS else {})), tmp_path)
    assert row == _plain_answer(shipped_shape) and len(seen) >= 3
    for anchor, drafts in seen:
        assert drafts == [row[anchor], *_drafted(objective, row[:anchor] + drafts, anchor)]
    assert len(seen[0][1]) == (5 if form in ("next", "dspark", "peagle") else 4)


def _drafted(objective: Any, text: list[int], anchor: int) -> list[int]:
    """The drafts of an objective after the token at `anchor` of `text`, which ends with these drafts."""
    tokens, anchors = torch.tensor([text]), torch.tensor([[anchor]])
    if isinstance(objective, ChainObjective):
        states = objective.unroll(tokens, *objective.read_target(tokens))
        return [int(objective.model.to_target(objective.model.logits(s[0, anchor - 1]).argmax())) for s in states]
    hidden = objective.hidden(tokens, anchors, objective.context(objective.read_target(tokens)[1]))
    return objective.logits(hidden, tokens[:, None, anchor:-1]).argmax(-1)[0, 0].tolist()


def _answer(target: Path, algorithm: Any, drafter: Path | None) -> list[int]:
    """A prompt and its greedy answer."""
    loaded, prompt = load_target(target, "cpu", torch.float32), list(range(10, 22))
    request = Request(0, tuple(prompt), SamplingParams(max_new_tokens=8), frozenset())
    tokenizer = Tokenizer.load(target)
    engine = engine_of(load_algorithm(algorithm, loaded, drafter), loaded, tokenizer, 1, request.max_length, "none")
    return prompt + engine.generate([request]).completions[0].token_ids


@cache
def _plain_answer(target: Path) -> list[int]:
    """Equal for all forms of drafters."""
    return _answer(target, "autoregressive", None)


@pytest.mark.parametrize("name", list(DRAFTERS))
def test_a_few_steps_lower_the_loss(shipped_shape: Path, tmp_path: Path, name: str) -> None:
    objective = _objective(name, shipped_shape, tmp_path)
    batch = objective.training.batch(0, 0)
    optimizer = torch.optim.AdamW(objective.model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = objective.batch_loss(batch, np.random.default_rng(0))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.01


SWEEP = (
    "text=tiny", "~text.kinds.functions", "text.kinds.arithmetic.count=6", "text.kinds.windows.count=6",
    "text.kinds.arithmetic.answer_tokens=12", "text.kinds.windows.answer_tokens=12",
    "text.kinds.windows.prompt_tokens=48", "text.validation=3", "text.shard=4", "text.batch=4",
    "evaluation.sets=[]", "evaluation.limit=2", "evaluation.max_new_tokens=6", "batch.tokens=256",
    "batch.evaluation_tokens=128", "train.threads=1", "train.device=cpu", "train.steps=2",
)  # fmt: skip


def test_a_list_of_drafters_is_told_the_sweep(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", "drafter=[dflash,eagle3]", "model=tiny"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert (
        ended.value.code == UserError.exit_code and "-m sweep=NAME drafter=dflash,eagle3\n" in capsys.readouterr().err
    )


def test_drafters_of_a_sweep_learn_from_the_same_tokens(
    shipped_shape: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A job that is done is not trained again, one that was killed goes on from its checkpoint."""
    fork_workers(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    where = ["model=local", f"model.path={shipped_shape}", f"text.folder={shipped_shape.parent / 'text'}"]

    def sweep(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", "sweep=two", *where, *SWEEP, *words])
        with pytest.raises(SystemExit) as ended:
            program.main()
        return int(ended.value.code or 0)

    dspark = ("drafter=dspark", "drafter.block_size=4", "drafter.markov_rank=4", "drafter.target_layer_ids=[1]")
    assert sweep(*dspark) == 0 and sweep("drafter=eagle3,peagle", "chain.steps=2") == 0
    folder = SweepFolder(tmp_path / "outputs/sweeps/two")
    records = folder.records()
    lines, keys = frame.read([folder])
    assert [line["drafter"] for line in lines] == ["dspark"] * 4 + ["eagle3"] * 4 + ["peagle"] * 4 and "method" in keys
    assert {line["data"] for line in lines} == {"arithmetic", "windows"}, "held-out prompts of the text, without sets"
    assert len({line["training_tokens"] for line in lines}) == 1 and all(line["tokens_per_step"] for line in lines)
    assert len({(folder.path / record.id / "text.json").read_text() for record in records}) == 1
    assert records[0].value is not None
    for name in ("summary.json", "training_summary.json"):
        (folder.path / records[0].id / name).unlink()
    checkpoint = (folder.path / records[0].id / "checkpoint.pt").stat().st_mtime_ns
    rows = (folder.path / records[0].id / "training.jsonl").read_text()
    assert sweep(*dspark) == 0
    assert (folder.path / records[0].id / "checkpoint.pt").stat().st_mtime_ns > checkpoint
    assert (folder.path / records[0].id / "training.jsonl").read_text() == rows


def _toy_objective(model: torch.nn.Module, scale: float = 1.0, **parts: Any) -> Any:
    """An objective that pulls the model to zero, or as `parts` say."""
    loss = lambda number, progress: (scale * model(torch.ones(1)).sum(), 1)  # noqa: E731
    return SimpleNamespace(**{"model": model, "loss": loss, "held_out": dict, "score": lambda found: None, **parts})


def test_best_model_is_what_is_exported(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    figures = iter([{"miss": 3.0}, {"miss": 1.0}, {"miss": 2.0}])
    seen: list[float] = []

    def evaluate() -> dict[str, float]:
        seen.append(float(model.weight.detach()))
        return next(figures)

    settings = _settings(steps=3, eval_every_steps=1)
    objective = _toy_objective(model, held_out=evaluate, score=lambda found: found["miss"])
    trainer = Trainer(objective, settings, tmp_path)
    trainer.run()
    assert trainer.restore_best() == 2 and float(model.weight.detach()) == seen[1] != seen[2]


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path: Path) -> None:
    trainer = Trainer(_toy_objective(torch.nn.Linear(1, 1), torch.nan), _settings(), tmp_path)
    with pytest.raises(ValueError, match="the loss of steps 1 to 1 is not finite"):
        trainer.run()


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_an_interrupted_training_says_what_is_kept(
    has_checkpoint: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`resume` is a switch here; in run.py it names a folder."""
    if has_checkpoint:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "checkpoint.pt").write_bytes(b"")
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(program, "train", interrupted)
    monkeypatch.setattr(sys, "argv", ["train", "drafter=eagle3", f"out_dir={tmp_path / 'out'}", "resume=false"])
    with pytest.raises(SystemExit) as caught:
        program.main()
    kept = f"the last checkpoint is {tmp_path}" if has_checkpoint else "no checkpoint yet; text that was written whole"
    told = capsys.readouterr().err
    assert caught.value.code == 130 and interrupted.call_args.args[0].resume is False
    assert kept in told and told.endswith("the same command goes on from there\n")


FULL = OSError(errno.ENOSPC, "No space left on device")
OF_TORCH = RuntimeError("[enforce fail] unexpected pos 8896 vs 8848")
OF_TORCH.__context__ = FULL


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (FULL, UserError, "the disk is full: make room for out_dir"),
        (OF_TORCH, UserError, "the disk is full: make room for out_dir"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), UserError, "the disk is full"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
    ids=["system", "torch", "safetensors", "another"],
)
def test_a_full_disk_is_named(error: Exception, kind: type[Exception], message: str, tmp_path: Path) -> None:
    """The system's error, or a library's, which has the system's as its context or quotes it."""
    with patch.object(program, "train", Mock(side_effect=error)), pytest.raises(kind, match=message):
        program.run(_target_config(tmp_path), OmegaConf.create())


def _train_in_two_parts(patch: pytest.MonkeyPatch, config: Any) -> None:
    """Train without the export."""
    run = Trainer.run

    def interrupted(trainer: Trainer) -> None:
        run(trainer, trainer.settings.steps // 2)
        continued = Trainer(trainer.objective, trainer.settings, trainer.folder)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter.zero_()  # only the checkpoint can bring the weights back
        assert continued.resume()
        run(continued)

    patch.setattr(Trainer, "run", interrupted)
    patch.setattr(program, "export", Mock())
    program.train(config)


@torch.no_grad()
def test_a_block_sees_features_before_its_anchor_and_itself_only(shipped_shape: Path, tmp_path: Path) -> None:
    drafting = _objective("dflash", shipped_shape, tmp_path)
    assert isinstance(drafting, BlockObjective)
    tokens = torch.randint(4, 400, (1, 20), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([[6, 11]])

    def hidden(tokens: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        return drafting.hidden(tokens, anchors, drafting.context(drafting.read_target(tokens)[1]))

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


@pytest.mark.parametrize("causal", [False, True])
def test_block_attention_is_masked_attention_over_context_and_block(causal: bool) -> None:
    """Against one masked softmax over all columns; anchor 0 sees its own block alone."""
    batch, length, size, heads, kv_heads, width = 2, 7, 3, 6, 2, 8
    decoder = target_module.decoder_config(
        target_module.ShapeSettings(
            num_hidden_layers=1, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width
        ),
        0,
    )
    config = DFlashConfig(decoder, size, (1,), 0, 4, (causal,))
    anchors, generator = torch.tensor([[0, 4], [2, 7]]), torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, batch, length, 1, kv_heads, width, generator=generator)
    q, k, v = (torch.randn(batch, 2, size, n, width, generator=generator) for n in (heads, kv_heads, kv_heads))
    table = rope_table(decoder, length + 2 * size, "cpu")
    found = BlockMixer(config, keys, values, anchors, table)(0, q, k, v, MixerWeights()).flatten(1, 2)
    q, k, v = (each.flatten(1, 2) for each in (q, k, v))
    positions = (anchors[..., None] + torch.arange(size)).flatten(1)
    all_keys = torch.cat([apply_rope(keys[:, :, 0], table, torch.arange(length)), apply_rope(k, table, positions)], 1)
    before = (torch.arange(length) < anchors[..., None]).repeat_interleave(size, 1)
    own = torch.eye(2, dtype=torch.bool).repeat_interleave(size, 0).repeat_interleave(size, 1).expand(batch, -1, -1)
    visible = torch.cat([before, own.tril() if causal else own], -1)[:, None]
    all_values = torch.cat([values[:, :, 0], v], 1)
    expected = plain_attention(apply_rope(q, table, positions), all_keys, all_values, visible)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_labels_stop_at_the_end_of_each_sequence() -> None:
    tokens = torch.arange(20).reshape(2, 10)
    labels = block_labels(tokens, torch.tensor([10, 6]), torch.tensor([[2, 8], [3, 4]]), 3)
    assert labels.tolist() == [[[3, 4, 5], [9, IGNORED, IGNORED]], [[14, 15, IGNORED], [15, IGNORED, IGNORED]]]


def _batch(rows: list[tuple[list[int], int]]) -> TrainingBatch:
    return _responses(rows).rows(np.arange(len(rows)))


def _responses(rows: list[tuple[list[int], int]], batch_tokens: int = 1000) -> ResponseSet:
    return ResponseSet(Text.of([Continuation(*row) for row in rows], 100), "cpu", batch_tokens)


def test_anchors_are_the_last_tokens_of_decoding_steps() -> None:
    """From the last prompt token, where decoding starts, to the last token that has a successor."""
    batch = _batch([(list(range(12)), 7), (list(range(5)), 4)])
    anchors = sample_anchors(batch, 300, np.random.default_rng(0))
    assert [set(row.tolist()) for row in anchors] == [{6, 7, 8, 9, 10}, {3}]
    assert sample_anchors(batch, 5, np.random.default_rng(0))[0].tolist() == [6, 7, 8, 9, 10]


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
    ("leading", "start", "draft_len", "steps"),
    [
        ([0, 0, 0], 1, 2, 2),
        ([0, 2, 9, 9], 2, 2, 1),
        ([0, 2, 9, 9, 0, 9], 2, 2, 2),
        ([0, 2, 9, 9, 0, 9], 2, 1, 2),
        ([1, 0, 1, 0, 0], 1, 3, 2),
    ],
    ids=["nothing right", "ends inside a draft", "a miss", "shorter drafts", "one each"],
)
def test_steps_by_hand(leading: list[int], start: int, draft_len: int, steps: int) -> None:
    assert num_steps(leading, start, len(leading), draft_len) == steps


def test_hits_before_the_first_miss() -> None:
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert leading_hits(hits).tolist() == [2, 0, 4]


def _states_by_hand(objective: ChainObjective, tokens: torch.Tensor, last: int) -> list[torch.Tensor]:
    """What the head returns after the token at `last`, each draft from the whole history: no cache, no unrolling.

    The drafts are the text's own tokens, as far as it goes.
    """
    drafter, target = objective.model, objective.target
    hidden, features = target(tokens[:, : last + 1], objective.mixer, drafter.target_layers)
    history = drafter.fuse(objective.scaled(features), hidden)[:, :last]
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
    hidden, features = objective.target(row, objective.mixer, drafter.target_layers)
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
    assert objective.scales is not None and objective.scales.numel() == len(objective.model.fc.weight[0])
    objective.scales = torch.linspace(0.5, 7, objective.scales.numel()).view_as(objective.scales)
    batch = _batch([(list(range(10, 30)), 8)])
    before, folded = objective.batch_loss(batch, np.random.default_rng(0)), objective.weights()
    assert not torch.equal(folded["fc.weight"], objective.model.fc.weight)
    objective.model.load_state_dict(folded)
    objective.scales = torch.ones_like(objective.scales)
    torch.testing.assert_close(objective.batch_loss(batch, np.random.default_rng(0)), before)


@pytest.mark.parametrize("name", list(DRAFTERS))
@torch.no_grad()
def test_training_starts_from_an_exported_drafter(shipped_shape: Path, tmp_path: Path, name: str) -> None:
    first = _objective(name, shipped_shape, tmp_path)
    if first.scales is not None:
        first.scales = first.scales * 3
    weights = {key: w.bfloat16().to(w.dtype) for key, w in first.weights().items()}
    export_weights(weights, first.hf_config(), tmp_path)
    config = _drafter_config(name, shipped_shape, tmp_path / "second")
    Path(config.out_dir).mkdir()
    config.start_from = str(tmp_path)
    second = config.build(Replicas())
    for key, weight in second.weights().items():
        torch.testing.assert_close(weight.float(), weights[key].float(), msg=key)
    shape = json.loads((tmp_path / "config.json").read_text())
    shape.get("transformer_layer_config", shape)["intermediate_size"] = 7
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with pytest.raises(ValueError, match=r"start_from=.*: expected .*intermediate_size \d+, got 7"):
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
        ({"minutes": 0.0}, "train.minutes: expected above 0"),
        ({"matrix_lr": float("nan")}, "train.matrix_lr: expected above 0"),
        ({"device": "gpu0"}, "train.device: expected auto, cpu or cuda, got 'gpu0'"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _settings(**changes)


@pytest.mark.parametrize("name", list(SCHEMAS))
def test_configs_compose(name: str) -> None:
    app_compose.register()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        config = compose("train", [f"drafter={name}", "train.steps=3"])
        assert config.train.steps == 3
        assert not OmegaConf.missing_keys(config)
        assert isinstance(OmegaConf.to_object(config), SCHEMAS[name])
        assert set(config.train) == set(asdict(TrainSettings()))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("drafter=target +foo=1", ["unknown key 'foo'", "keys of a run: ", "out_dir"]),
        ("drafter=dflash train.stepz=3", ["unknown key 'train.stepz'", "train.steps=…", "keys of train: "]),
        ("drafter=eagle train.steps=-1", ["train.steps: expected at least 1 or null, got -1"]),
        ("drafter=draft out_dir=/proc/x", ["/proc/x", "out_dir"]),
        ("", ["drafter", *SCHEMAS]),
    ],
)
def test_a_mistake_gets_one_screen(
    arguments: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        program.main()
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith("error: ") and len(printed.splitlines()) < 16
    assert [text for text in expected if text not in printed] == [], printed
    assert "algo" not in printed and list(tmp_path.iterdir()) == []


def test_a_program_prints_its_summary_and_names_a_missing_target(
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
