"""The text that drafters learn from: prompts of every source, shards, markup that is refused."""

import json
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from algorithms.models.folder import ModelError
from algorithms.models.loading import Target, load_target
from algorithms.models.tokenizer import Tokenizer
from experiments.app.files import locked
from experiments.app.schema import REPO_ROOT
from experiments.training.batches import Continuation, Text
from experiments.training.objectives.dflash import mask_token
from experiments.training.parallel import Replicas
from experiments.training.served import Writer
from experiments.training.text import source as source_module
from experiments.training.text.prompt_sources import (
    TRAINING,
    VALIDATION,
    KindSettings,
    TextSettings,
    open_prompts,
    stop_ids,
    user_turn,
)
from experiments.training.text.source import TextSource

TINY = REPO_ROOT / "assets" / "tiny" / "target"


@pytest.fixture(scope="module")
def target() -> Target:
    torch.set_num_threads(1)
    return load_target(TINY, "cpu", torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY)


def sequences_of(text: Text) -> list[Continuation]:
    """Inverse of `Text.of`."""
    parts = np.split(text.tokens, np.cumsum(text.lengths)[:-1]) if len(text) else []
    return [Continuation(part.tolist(), int(start)) for part, start in zip(parts, text.starts, strict=True)]


def _settings(folder: Path, count: int = 5, **changes: Any) -> TextSettings:
    kinds = {"word": KindSettings(source="arithmetic", count=count, answer_tokens=4, sampled_share=0.5)}
    return TextSettings(**{"kinds": kinds, "folder": str(folder), "validation": 2, "shard": 2, "batch": 4} | changes)


def _shards(folder: Path) -> dict[str, float]:
    return {path.stem: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_tokens_take_16_bits_only_where_these_number_the_vocabulary(
    tmp_path: Path, vocab_size: int, dtype: type
) -> None:
    for sequences in ([], [Continuation([1, vocab_size - 1, 3], 2), Continuation([vocab_size - 1] * 5, 1)]):
        text = Text.of(sequences, vocab_size)
        text.write(tmp_path / "text")
        read = Text.read(tmp_path / "text")
        assert read.tokens.dtype == dtype and sequences_of(read) == sequences and len(read) == len(sequences)
    joined = Text.join([read, text])
    assert sequences_of(joined) == sequences * 2 and joined.num_answer_tokens == 2 * (1 + 4)


def _hold(lock: Path, held: Any, done: Any) -> None:
    with locked(lock) as mine:
        held.put(mine)
        done.get()


def test_a_shard_belongs_to_one_program(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TextSource(target, _settings(tmp_path))
    monkeypatch.setattr(source, "_conversed", lambda *_: [])
    (kind, name), *_ = source._shards()
    file, context = source._file(kind, name), multiprocessing.get_context("fork")
    held, done = context.Queue(), context.Queue()
    other = context.Process(target=_hold, args=(file.with_suffix(".lock"), held, done))
    other.start()
    assert held.get(timeout=30) is True
    assert not source._provide(kind, name, wait=False)
    done.put(None)
    other.join()
    assert source._provide(kind, name, wait=True), "the program that held it ended without writing it"
    written = file.stat().st_mtime_ns
    assert source._provide(kind, name, wait=True) and file.stat().st_mtime_ns == written


def test_interrupted_and_continued_text_equals_uninterrupted(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for out in ("a", "b", "c"):
        (tmp_path / out).mkdir()
    whole = TextSource(target, _settings(tmp_path / "whole")).training(tmp_path / "a", Replicas())
    write, parts = Writer.write, tmp_path / "parts"

    def fail_at_the_second(writer: Writer, requests: Any, label: str) -> list[list[int]]:
        if _shards(parts):
            raise KeyboardInterrupt
        return write(writer, requests, label)

    monkeypatch.setattr(Writer, "write", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        TextSource(target, _settings(parts)).training(tmp_path / "b", Replicas())
    first = _shards(parts)
    assert list(first) == ["00000000-00000002"]
    monkeypatch.setattr(Writer, "write", write)
    continued = TextSource(target, _settings(parts)).training(tmp_path / "b", Replicas())
    assert sequences_of(continued) == sequences_of(whole) and len(whole) == 5
    assert first.items() <= _shards(parts).items(), "a shard was written twice"
    more = TextSource(target, _settings(parts, count=8)).training(tmp_path / "c", Replicas())
    assert len(more) == 8 and first.items() <= _shards(parts).items()
    again = TextSource(target, _settings(parts, count=8)).training(tmp_path / "b", Replicas())
    assert sequences_of(again) == sequences_of(whole), "a resumed run learns from the text that it began with"


def test_text_of_other_settings_is_kept_apart(target: Target, tmp_path: Path) -> None:
    for number, changes in enumerate(({}, {"seed": 1}, {"shard": 3})):
        TextSource(target, _settings(tmp_path / "text", **changes)).validation()
        assert len(_shards(tmp_path / "text")) == 1
        assert len(list((tmp_path / "text").iterdir())) == number + 1


def test_answers_are_the_targets(target: Target, tmp_path: Path) -> None:
    """The greedy half of the answers, token by token from the dense definition."""
    from algorithms.models.dense_mixer import DenseMixer

    text = TextSource(target, _settings(tmp_path, count=4, shard=4)).training(tmp_path, Replicas())
    mixer = DenseMixer(target.config, 128, "cpu")
    greedy = 0
    with torch.no_grad():
        for sequence in sequences_of(text):
            hidden, _ = target.model(torch.tensor([sequence.tokens]), mixer)
            best = target.model.logits(hidden[0, sequence.start - 1 : -1]).argmax(-1).tolist()
            greedy += best == sequence.tokens[sequence.start :]
    assert greedy >= 2


def test_a_deadline_keeps_what_is_written(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 25))
    monkeypatch.setattr(source_module.time, "monotonic", lambda: next(clock))
    text = TextSource(target, _settings(tmp_path / "text", count=8, minutes=1.0)).training(tmp_path, Replicas())
    assert 2 <= len(text) < 8
    assert len(json.loads((tmp_path / "text.json").read_text())) == len(text) // 2


def test_kinds_are_mixed_from_the_first_shard_on(target: Target, tmp_path: Path) -> None:
    kind = KindSettings(source="arithmetic", answer_tokens=4)
    kinds = {"many": kind, "few": KindSettings(source="arithmetic", count=4, answer_tokens=5)}
    settings = TextSettings(kinds, str(tmp_path), shard=2)
    kind.count = 8
    order = [name for name, _ in TextSource(target, settings)._shards()]
    assert order == ["many", "few", "many", "many", "few", "many"]


def test_user_turns_of_the_target_itself(tokenizer: Tokenizer) -> None:
    """The tiny target has unlearnt to write questions, so a script stands for it."""
    kind, end = KindSettings(openings=["Tom has ", "How many "], prompt_tokens=9), tokenizer.encode("<|assistant|>")
    seeds: list[int] = []

    def write(requests: Any, label: str) -> list[list[int]]:
        seeds.extend(request.sampling.seed for request in requests)
        for request in requests:
            assert request.sampling.temperature == 1.0 and request.sampling.max_new_tokens == 9
            assert request.prompt_ids == tuple(tokenizer.encode("<|user|>" + kind.openings[request.id % 2]))
            assert {end[0], 0} <= request.ends and 5 not in request.ends
        words = [tokenizer.encode(f"{request.id} eggs?") for request in requests]
        return [words[0] + end, words[1] + end, words[2], words[3] + [0], words[0] + end, []]

    prompts = open_prompts(kind, tokenizer, 0, 4, write)
    expected = [tokenizer.encode_chat([turn]) for turn in ("Tom has 0 eggs?", "How many 1 eggs?")]
    assert prompts(TRAINING, 0, 6) == expected, "unfinished, empty and repeated turns are left out"
    prompts(TRAINING, 0, 6)
    prompts(VALIDATION, 0, 6)
    assert seeds[:6] == seeds[6:12] and not set(seeds[:6]) & set(seeds[12:])


def test_later_turns_follow_the_whole_conversation(
    target: Target, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script stands for the target: conversation 0 goes on, 1 is cut off in its answer, 2 in its second turn."""
    user, end = tokenizer.encode("<|assistant|>"), tokenizer.encode("<|endoftext|>")
    say = tokenizer.encode
    script = [
        [say("One?") + user, say("Two?") + user, say("Three?") + user],
        [say("yes") + end, say("no"), say("well") + end],
        [say("And now?") + user, say("And")],
        [say("still yes") + end],
    ]
    asked: list[list[tuple[int, ...]]] = []

    def write(_: TextSource, requests: Any, label: str) -> list[list[int]]:
        asked.append([request.prompt_ids for request in requests])
        return script[len(asked) - 1]

    monkeypatch.setattr(TextSource, "_write", write)
    kinds = {"chat": KindSettings(count=3, turns=2)}
    text = TextSource(target, TextSettings(kinds, str(tmp_path), shard=3)).training(tmp_path, Replicas())
    first = [tokenizer.encode_chat([words]) for words in ("One?", "Two?", "Three?")]
    second = tokenizer.encode_chat(["One?", "And now?"], ["yes"])
    answers = [*script[1], script[3][0]]
    pairs = zip([*first, second], answers, strict=True)
    assert sequences_of(text) == [Continuation(prompt + answer, len(prompt)) for prompt, answer in pairs]
    assert asked[2] == [tuple(p + a + say("<|user|>")) for p, a in ((first[0], script[1][0]), (first[2], script[1][2]))]


def _no_writing(*_: Any) -> list[list[int]]:
    raise AssertionError("a file needs no target")


@pytest.mark.parametrize("suffix", ["jsonl", "txt"])
def test_prompts_of_a_file(tokenizer: Tokenizer, tmp_path: Path, suffix: str) -> None:
    texts = [f"question number {i}" for i in range(12)] + ["far " * 400]
    path = tmp_path / f"prompts.{suffix}"
    lines = [json.dumps({"prompt": text}) for text in texts] if suffix == "jsonl" else ["\n\n".join(texts)]
    path.write_text("\n".join(lines))
    kind = KindSettings(source="file", path=str(path), template="Say it: {prompt}!", prompt_tokens=40)
    prompts = open_prompts(kind, tokenizer, 0, 3, _no_writing)
    training, held_out = prompts(TRAINING, 0, 100), prompts(VALIDATION, 0, 3)
    expected = {tuple(tokenizer.encode_chat([f"Say it: {text}!"])) for text in texts[:12]}
    assert set(map(tuple, training)) | set(map(tuple, held_out)) == expected
    assert not set(map(tuple, training)) & set(map(tuple, held_out)) and len(held_out) >= 1
    assert prompts(TRAINING, 0, 4) + prompts(TRAINING, 4, 100) == training


def _folder(tmp_path: Path, **config: Any) -> Tokenizer:
    """The tiny tokenizer with other entries in its config; a template of None is left out."""
    shutil.copyfile(TINY / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "[INST] {{ messages[0]['content'] }} [/INST]",
        "<|user|>{{ messages[0]['content'] | upper }}<|assistant|>",
        "<|user|>{{ messages[0]['content'] }}",
        None,
    ],
    ids=["no special token", "changed words", "nothing after", "no template"],
)
def test_markup_that_cannot_be_written_by_the_target_is_refused(tmp_path: Path, template: str | None) -> None:
    tokenizer = _folder(tmp_path, eos_token="<|endoftext|>", **({"chat_template": template} if template else {}))
    with pytest.raises(ModelError, match="chat template"):
        user_turn(tokenizer)


def test_a_template_that_ends_answers_otherwise_has_no_later_turns(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|user|>{{ m['content'] }}<|assistant|>{% endfor %}"
    tokenizer = _folder(tmp_path, eos_token="<|endoftext|>", chat_template=template)
    with pytest.raises(ModelError, match="does not end an answer"):
        open_prompts(KindSettings(turns=2), tokenizer, 0, 4, _no_writing)


def test_a_folder_without_a_stop_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no token that ends an answer"):
        stop_ids(_folder(tmp_path))


def test_the_mask_is_a_token_that_means_nothing_else(tmp_path: Path) -> None:
    template = "<|user|>{{ messages[0]['content'] }}<|assistant|>"
    named = _folder(tmp_path, mask_token="<|assistant|>", chat_template=template)
    assert mask_token(named, 2048) == 2
    plain = _folder(tmp_path, eos_token="<|endoftext|>", chat_template=template)
    assert mask_token(plain, 2050) == 2048, "an unused row after the vocabulary"
    assert mask_token(plain, 2048) == 3, "the special token that nothing names"
    used = _folder(tmp_path, eos_token="<|endoftext|>", pad_token="<|mask|>", chat_template=template)
    assert mask_token(used, 2048) == 2048, "a row that the drafter owns"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "a.txt"}, "text.kinds.*.path belongs to source=file"),
        ({"template": "no place"}, "text.kinds.*.template: expected {prompt} once"),
        ({"source": "arithmetic", "turns": 2}, "text.kinds.*.turns above 1 belongs to source=target"),
    ],
)
def test_settings_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        KindSettings(**changes)
    assert message in str(raised.value)


def test_text_without_kinds_or_with_a_missing_file_is_refused(target: Target, tmp_path: Path) -> None:
    kinds = {"mine": KindSettings(source="file", path=str(tmp_path / "none.jsonl"))}
    missing = r"text\.kinds\.mine\.path: expected a file, there is none at .*none\.jsonl"
    for given, message in (({}, r"text\.kinds: expected at least one"), (kinds, missing)):
        with pytest.raises(ValueError, match=message):
            TextSource(target, TextSettings(given, str(tmp_path)))


def test_the_target_is_differentiable_again_after_writing(target: Target, tmp_path: Path) -> None:
    """On a GPU the writing engine sets the target's kernels, which have no gradient and expect its dtype."""
    source = TextSource(target, _settings(tmp_path / "text"))
    target.model.set_forward("reference")
    source.close()
    assert target.model.impl is None
