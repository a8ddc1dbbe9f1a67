"""A draft model with another tokenizer: which tokens are the same, what is drafted, and the output."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from algorithms.frontend import load_algorithm
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.folder import ModelError
from algorithms.models.loading import Target, load_target
from algorithms.models.shared_vocabulary import SharedVocabulary
from algorithms.models.tokenizer import Tokenizer as FolderTokenizer
from tests.algorithms.drafters import Watched, chi_square_p
from tests.algorithms.tiny_folders import edit_json, small_config, write_target, write_weights
from tests.algorithms.toy import Setup, answers, changed, requests, run

BYTE_LEVEL = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_tokenizer(folder: Path, symbols: Sequence[str], end: str, kind: Any = decoders.ByteLevel) -> FolderTokenizer:
    """A tokenizer with these symbols in this order; `end` is the one special token and ends a text."""
    folder.mkdir(parents=True, exist_ok=True)
    fallback = kind is not decoders.ByteLevel
    vocab = {symbol: i for i, symbol in enumerate(symbols)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=fallback, unk_token=end))
    made.pre_tokenizer = pre_tokenizers.Metaspace() if fallback else pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = kind()
    made.add_special_tokens([AddedToken(end, special=True, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{end}"}}')
    (folder / "config.json").unlink(missing_ok=True)
    return FolderTokenizer.load(folder)


def test_tokens_are_the_same_by_their_bytes(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "target", ["<end>", "a", "b", "Ġ", "Ġa", "é", "Ã", "ab"], "<end>")
    spaced = ["</s>", "<0xC3>", "▁a", "b", "a", "▁"]
    draft = write_tokenizer(tmp_path / "draft", spaced, "</s>", decoders.Metaspace)
    shared = SharedVocabulary.of(target, draft, 10, 6)
    pairs = dict(zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True))
    # é is the byte 0xE9 of a byte-level tokenizer, which the other does not have; Ã is the byte 0xC3.
    assert pairs == {0: 0, 1: 4, 2: 3, 3: 5, 4: 2, 6: 1}
    assert shared.substitutes.tolist()[7] == 3 and len(shared.substitutes) == 10
    assert (shared.offsets + torch.arange(6)).tolist() == shared.target_ids.tolist()


def test_ids_past_a_models_vocabulary_are_left_out(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "target", ["<end>", "a", "b", "c"], "<end>")
    shared = SharedVocabulary.of(target, target, 3, 2)
    assert shared.target_ids.tolist() == [0, 1] and len(shared.substitutes) == 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Target, Path]:
    """A target, a draft model of the same vocabulary, and the folder of that draft model with another tokenizer: its
    ids in another order, and every 40th byte missing."""
    home = tmp_path_factory.mktemp("vocabularies")
    write_target(home / "target", small_config(num_layers=2), seed=1)
    write_target(home / "draft", small_config(num_layers=2), seed=2)
    target, draft = (load_target(home / name, "cpu", torch.float32) for name in ("target", "draft"))
    kept = [4 + i for i in range(256) if i % 40]
    order = [0, *torch.tensor(kept)[torch.randperm(len(kept), generator=torch.Generator().manual_seed(3))].tolist()]
    other = load_target(home / "draft", "cpu", torch.float32).model
    other.model.embed_tokens.weight.data = other.model.embed_tokens.weight.data[order]
    other.lm_head.weight.data = other.lm_head.weight.data[order]  # type: ignore[union-attr]
    write_target(home / "other", small_config(num_layers=2), seed=2)
    write_weights(home / "other", other.state_dict())
    edit_json(home / "other" / "config.json", vocab_size=len(order))
    config = (home / "other" / "config.json").read_text()
    write_tokenizer(home / "other", ["<|end|>", *(BYTE_LEVEL[i - 4] for i in order[1:])], "<|end|>")
    (home / "other" / "config.json").write_text(config)
    return target, draft, home / "other"


def asked_of(count: int, new_tokens: int = 10, **changes: Any) -> list[Any]:
    return requests(count, max_new_tokens=new_tokens, **changes)


def test_the_tokenizers_must_fit_unless_the_intersection_is_asked_for(folders: tuple[Target, Target, Path]) -> None:
    target, _, other = folders
    with pytest.raises(ModelError, match="vocab_size"):
        load_algorithm("standalone", target, other)
    with pytest.raises(ValueError, match="algo.vocabulary: expected one of same, intersection, got 'mine'"):
        load_algorithm("standalone", target, other, vocabulary="mine")


def test_drafts_are_the_most_likely_tokens_in_common(folders: tuple[Target, Target, Path]) -> None:
    """On texts of tokens in common the drafts are those of the model in its own ids, restricted to these tokens."""
    target, draft, other = folders
    algorithm = load_algorithm("standalone", target, other, vocabulary="intersection", steps=3)
    watched = Watched(algorithm)
    run(algorithm, asked_of(6), Setup(), target)
    shared = [0, *(4 + i for i in range(256) if i % 40)]
    checked = 0
    for text, nodes, _ in watched.drafts:
        if not set(text) <= set(shared):
            continue
        written = list(text)
        for _ in nodes[1:]:
            hidden, _ = draft.model(torch.tensor([written]), DenseMixer(draft.config, len(written), "cpu"))
            written.append(shared[int(draft.model.logits(hidden[0, -1])[shared].argmax())])
        assert nodes[1:] == written[len(text) :]
        checked += 1
    assert checked >= 5


@pytest.mark.parametrize("settings", [{}, {"topk": 3, "num_nodes": 9}], ids=["chain", "tree"])
def test_output_is_the_targets(folders: tuple[Target, Target, Path], settings: dict[str, Any]) -> None:
    target, _, other = folders
    asked = [changed(request, temperature=float(request.id % 2)) for request in asked_of(5)]
    setup = Setup(page_size=4)
    algorithm = load_algorithm("standalone", target, other, vocabulary="intersection", **settings)
    completions = run(algorithm, asked, setup, target).completions
    assert [c.token_ids for c in completions] == answers(asked, setup, target)


@pytest.mark.parametrize(
    "settings", [{"rule": "block"}, {"topk": 2, "num_nodes": 5, "draft_sampling": "without_replacement"}]
)
def test_sampled_drafts_follow_the_targets_distribution(
    folders: tuple[Target, Target, Path], settings: dict[str, Any]
) -> None:
    target, _, other = folders
    algorithm = load_algorithm("standalone", target, other, vocabulary="intersection", steps=2, **settings)
    (first,) = asked_of(1, 2, temperature=0.7, top_k=5)
    asked = [changed(first, id=seed, seed=seed) for seed in range(1000)]
    counts = Counter(
        tuple(c.token_ids) for c in run(algorithm, asked, Setup(max_batch=500, prefill_tile=4), target).completions
    )

    def following(text: list[int]) -> dict[int, float]:
        hidden, _ = target.model(torch.tensor([text]), DenseMixer(target.config, len(text), "cpu"))
        top = (target.model.logits(hidden[0, -1]) / 0.7).topk(5)
        return dict(zip(top.indices.tolist(), top.values.double().softmax(0).tolist(), strict=True))

    prompt = list(asked[0].prompt_ids)
    exact = {(a, b): p * q for a, p in following(prompt).items() for b, q in following([*prompt, a]).items()}
    assert chi_square_p(exact, counts) > 1e-6
