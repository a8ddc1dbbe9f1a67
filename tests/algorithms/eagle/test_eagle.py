"""EAGLE and EAGLE-3 heads: levels of trees, published folders, and what does not fit. `test_published` has what they
compute."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algorithms.drafting.level_drafter import NORMED, RAW
from algorithms.eagle import loading
from algorithms.eagle.config import Eagle3Config, EagleConfig, default_aux_layer_ids
from algorithms.eagle.model import Eagle3Drafter, EagleDrafter
from algorithms.models.config import DecoderConfig
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.loading import Target, load_draft, load_target
from tests.algorithms import tiny_folders

DRAFT_VOCAB = 40
GUARDED = ("causal_head", "sample_from_anchor", "num_anchors", "enable_confidence_head")
"""Keys of block drafters, which say that the file is to be read in another way."""

Weights = dict[str, Tensor]
load_eagle = partial(loading.load_eagle, kind="EAGLE")
load_eagle3 = partial(loading.load_eagle, kind="EAGLE-3")


def head_config(**changes: Any) -> DecoderConfig:
    return tiny_folders.small_config("llama", num_layers=1, **changes)


def target_config() -> DecoderConfig:
    return tiny_folders.small_config(num_layers=8)


def vocabulary(vocab_size: int) -> Tensor:
    """Rising target ids with gaps, the last id among them."""
    ids = torch.randperm(vocab_size - 1, generator=torch.Generator().manual_seed(8))[: DRAFT_VOCAB - 1]
    return torch.cat([ids, torch.tensor([vocab_size - 1])]).sort().values


def write_eagle(folder: Path, config: EagleConfig, own_embedding: bool = True, pickled: bool = False) -> Weights:
    """A head folder in the published layout; returns the tensors as written."""
    folder.mkdir(parents=True)
    drafter = EagleDrafter(config, own_embedding).requires_grad_(False)
    tiny_folders.randomise(drafter, 3)
    return write_head(folder, {**config.to_hf(), "architectures": ["LlamaForCausalLM"]}, drafter, pickled)


def write_eagle3(folder: Path, config: Eagle3Config, pickled: bool = False, **flags: bool) -> Weights:
    folder.mkdir(parents=True)
    drafter = Eagle3Drafter(config, 8, **flags).requires_grad_(False)
    tiny_folders.randomise(drafter, 4)
    if config.logits == RAW:  # a norm that is not used is not trained
        drafter.norm.weight.fill_(1)
    if config.reduced:
        drafter.set_vocabulary(vocabulary(config.decoder.vocab_size))
    return write_head(folder, config.to_hf(), drafter, pickled)


def write_head(folder: Path, config: dict[str, Any], drafter: nn.Module, pickled: bool) -> Weights:
    tensors = dict(drafter.state_dict())
    tiny_folders.write_json(folder / "config.json", config)
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        tiny_folders.write_weights(folder, tensors)
    return tensors


def eagle3_config(**changes: Any) -> Eagle3Config:
    decoder = head_config()
    config = Eagle3Config(decoder, DRAFT_VOCAB, decoder.hidden_size, None)
    return replace(config, **changes)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("target")
    tiny_folders.write_target(folder, target_config())
    return load_target(folder, "cpu", torch.float32)


@pytest.mark.parametrize("impl", [None, "reference", "triton"])
@pytest.mark.parametrize(
    ("residual", "feedback", "logits"), [(RAW, RAW, NORMED), (NORMED, RAW, RAW), (RAW, NORMED, NORMED)]
)
@torch.no_grad()
def test_a_level_is_the_head_over_the_features_of_its_parents(
    tmp_path: Path, target: Target, residual: str, feedback: str, logits: str, impl: str | None
) -> None:
    write_eagle3(tmp_path / "head", eagle3_config(residual=residual, feedback=feedback, logits=logits))
    drafter = load_eagle3(tmp_path / "head", target)
    generator = torch.Generator().manual_seed(3)
    feature = torch.randn(2, 4, 32, generator=generator)
    tokens = torch.randint(0, 272, (2, 5), generator=generator)
    sources = torch.tensor([[3, 0, 0, 2, 1], [1, 1, 3, 0, 2]])
    of_parents = torch.stack([feature[row, sources[row]] for row in range(2)])
    mixer = DenseMixer(drafter.decoder, 5, "cpu")
    hidden = drafter(tokens, of_parents, mixer)
    wanted = drafter.logits(hidden)
    drafter.set_forward(impl)
    for got in (
        drafter.advance(tokens, feature, mixer, 1, sources),
        drafter.advance(tokens, of_parents, mixer, 1, None),
    ):
        torch.testing.assert_close(got, (hidden, wanted), atol=1e-5, rtol=1e-4)


def test_what_is_written_reads_back() -> None:
    """EAGLE-3 itself writes no key that another engine reads in its own way."""
    assert {"norm_output", "feedback", "logits"}.isdisjoint(eagle3_config().to_hf())
    for feature_norm in (None, "joint", "each"):
        for feedback, logits in ((RAW, NORMED), (RAW, RAW), (NORMED, NORMED)):
            for residual, mask_token_id in ((RAW, None), (NORMED, 7)):
                config = eagle3_config(
                    feature_norm=feature_norm, feedback=feedback, logits=logits, residual=residual,
                    mask_token_id=mask_token_id,
                )  # fmt: skip
                assert Eagle3Config.from_hf(config.to_hf()) == config
    published = {**eagle3_config().to_hf(), "fc_norm": True}
    assert Eagle3Config.from_hf(published).feedback == RAW
    nested = {**eagle3_config().to_hf(), "eagle_config": {"fc_norm": True, "norm_output": True}}
    assert Eagle3Config.from_hf(nested).feedback == NORMED


def test_norm_output_without_fc_norm(tmp_path: Path, target: Target) -> None:
    """True has two meanings. False says that the LM head reads the raw stream where the norm was not trained."""
    write_eagle3(tmp_path / "head", eagle3_config())
    config_file = tmp_path / "head" / "config.json"
    tiny_folders.edit_json(config_file, norm_output=True)
    tiny_folders.refusal(lambda: load_eagle3(tmp_path / "head", target), "has two meanings", "feedback=raw")
    for feedback in (RAW, NORMED):
        tiny_folders.edit_json(config_file, feedback=feedback)
        config = load_eagle3(tmp_path / "head", target).config
        assert (config.feedback, config.logits) == (feedback, NORMED)
    tiny_folders.edit_json(config_file, norm_output=False, feedback=None)
    assert load_eagle3(tmp_path / "head", target).config.logits == NORMED
    tiny_folders.change_weights(tmp_path / "head", norm__weight=torch.ones(32))
    assert load_eagle3(tmp_path / "head", target).config.logits == RAW


def test_layer_ids_are_outputs() -> None:
    """SafeAILab reads in front of layers 2, n/2, n-3; a list in the config names outputs, as SpecForge writes it."""
    assert default_aux_layer_ids(32) == (1, 15, 28)
    published = {**eagle3_config().to_hf(), "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}
    assert Eagle3Config.from_hf(published).layer_ids(36) == (1, 17, 32)
    assert eagle3_config().layer_ids(8) == (1, 3, 4)


@torch.no_grad()
def test_captured_layers_are_what_the_head_reads(tmp_path: Path, target: Target) -> None:
    write_eagle3(tmp_path / "head", eagle3_config())
    drafter = load_eagle3(tmp_path / "head", target)
    mixer = DenseMixer(target.config, 5, "cpu")
    inputs: list[Tensor] = []
    hooks = [
        target.model.model.layers[index].register_forward_pre_hook(lambda _, args: inputs.append(args[1]))
        for index in (2, 8 // 2, 8 - 3)
    ]
    _, features = target.model(torch.arange(5)[None], mixer, drafter.target_layers)
    for hook in hooks:
        hook.remove()
    for feature, layer_input in zip(features, inputs, strict=True):
        assert torch.equal(feature, layer_input)


def test_pickled_folders(tmp_path: Path, target: Target) -> None:
    """As SafeAILab's heads are published, one of them without a bias; ids keep their types in any dtype."""
    written = write_eagle(tmp_path / "one", EagleConfig(head_config(), fc_bias=False), pickled=True)
    first = load_eagle(tmp_path / "one", target)
    assert "fc.bias" not in written
    for name, tensor in written.items():
        assert torch.equal(first.state_dict()[name], tensor), name
    assert not any(parameter.requires_grad for parameter in first.parameters())
    written = write_eagle3(tmp_path / "three", eagle3_config(), pickled=True)
    third = load_eagle3(tmp_path / "three", load_target(target.path, "cpu", torch.bfloat16))
    assert third.d2t.dtype == torch.int64 and third.t2d.dtype == torch.bool and third.fc.weight.dtype == torch.bfloat16
    assert torch.equal(third.d2t, written["d2t"]) and torch.equal(third.t2d, written["t2d"])


def test_config_that_repeats_the_targets_depth_has_one_layer(tmp_path: Path, target: Target) -> None:
    write_eagle3(tmp_path / "head", eagle3_config())
    tiny_folders.edit_json(tmp_path / "head" / "config.json", num_hidden_layers=40)
    assert load_eagle3(tmp_path / "head", target).config.decoder.num_layers == 1


def test_eagle3_over_the_whole_vocabulary_borrows_the_head(tmp_path: Path, target: Target) -> None:
    config = eagle3_config(draft_vocab_size=272)
    write_eagle3(tmp_path / "head", config, own_head=False)
    drafter = load_eagle3(tmp_path / "head", target)
    hidden = torch.randn(2, 32)
    torch.testing.assert_close(drafter.logits(hidden), target.model.logits(drafter.norm(hidden)))
    assert torch.equal(drafter.to_target(torch.tensor([5])), torch.tensor([5]))


def test_eagle3_of_another_width_with_its_own_embedding(tmp_path: Path, target: Target) -> None:
    config = eagle3_config(decoder=head_config(hidden_size=48))
    write_eagle3(tmp_path / "head", config, own_embedding=True)
    drafter = load_eagle3(tmp_path / "head", target)
    assert drafter.fuse([torch.randn(1, 32)] * 3, torch.randn(1, 32)).shape == (1, 48)
    assert drafter.embed(torch.tensor([3])).shape == (1, 48)


OF_LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("kind", "weights", "keys", "parts"),
    [
        ("EAGLE", {"fc__bias": None}, {}, ("lack tensors", "fc.bias")),
        ("EAGLE", {"fc__weight": torch.zeros(32, 63)}, {}, ("'fc.weight'", "[32, 64]", "[32, 63]")),
        ("EAGLE", {"layers__0__input_layernorm__weight": torch.ones(32)}, {}, ("unknown", "input_layernorm")),
        ("EAGLE", {"fc__weight": None}, {}, ("not an EAGLE head", "architectures")),
        ("EAGLE", {}, {"draft_vocab_size": 40}, ("draft_vocab_size", "272", "40")),
        ("EAGLE-3", {"d2t": None}, {}, ("lack tensors", "d2t")),
        ("EAGLE-3", {"d2t": torch.zeros(DRAFT_VOCAB)}, {}, ("'d2t'", "dtype", "I64")),
        ("EAGLE-3", {"d2t": vocabulary(272)}, {}, ("vocabulary contradicts itself", "t2d marks 40 ids")),
        ("EAGLE-3", {"lm_head__weight": torch.zeros(41, 32)}, {}, ("'lm_head.weight'", "[40, 32]", "[41, 32]")),
        ("EAGLE-3", {"lm_head__weight": None}, {}, ("do not fit", "draft_vocab_size", "272", "40")),
        (
            "EAGLE-3",
            {"midlayer__self_attn__q_proj__weight": torch.zeros(64, 32)},
            {},
            ("q_proj", "[64, 64]", "[64, 32]"),
        ),
        ("EAGLE-3", {}, {"target_hidden_size": 64}, ("do not fit", "target_hidden_size", "32", "64")),
        ("EAGLE-3", {}, {"vocab_size": 300}, ("do not fit", "vocab_size", "272", "300")),
        ("EAGLE-3", {}, {"eagle_config": {OF_LAYERS: [1, 3, 8]}}, ("target layers", "0 to 7", "[1, 3, 8]")),
        ("EAGLE-3", {}, {"eagle_config": {OF_LAYERS: [1, 3]}}, ("'fc.weight'", "[32, 64]", "[32, 96]")),
        ("EAGLE-3", {}, {"eagle_config": {OF_LAYERS: []}}, ("at least one layer",)),
        ("EAGLE-3", {}, {"draft_vocab_size": 400}, ("draft_vocab_size", "272", "400")),
        ("EAGLE-3", {}, {"norm_before_fc": True}, ("lack tensors", "input_norm.weight")),
        ("EAGLE-3", {}, {"norm_before_fc": True, "fc_norm": True}, ("one of them at most",)),
        *[("EAGLE-3", {}, {key: 1}, ("not supported", f"{key}=1")) for key in GUARDED],
        ("EAGLE-3", {}, {"final_logit_softcapping": 30.0}, ("not supported", "final_logit_softcapping=30.0")),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, target: Target, kind: str, weights: Any, keys: dict[str, Any], parts: tuple[str, ...]
) -> None:
    """Heads whose tensors or config keys are changed."""
    folder = tmp_path / "head"
    write_eagle(folder, EagleConfig(head_config())) if kind == "EAGLE" else write_eagle3(folder, eagle3_config())
    tiny_folders.change_weights(folder, **weights)
    tiny_folders.edit_json(folder / "config.json", **keys)
    tiny_folders.refusal(lambda: loading.load_eagle(folder, target, kind), *parts)


def test_default_layers_of_a_shallow_target(tmp_path: Path) -> None:
    tiny_folders.write_target(tmp_path / "target", tiny_folders.small_config(num_layers=4))
    write_eagle3(tmp_path / "head", eagle3_config())
    shallow = load_target(tmp_path / "target", "cpu", torch.float32)
    tiny_folders.refusal(lambda: load_eagle3(tmp_path / "head", shallow), ">= 5 layers", "got 4")


def test_the_two_kinds_are_not_taken_for_each_other(tmp_path: Path, target: Target) -> None:
    write_eagle(tmp_path / "one", EagleConfig(head_config()))
    write_eagle3(tmp_path / "three", eagle3_config())
    tiny_folders.refusal(lambda: load_eagle3(tmp_path / "one", target), "not an EAGLE-3 head", "algo=eagle")
    tiny_folders.refusal(lambda: load_eagle(tmp_path / "three", target), "not an EAGLE head", "algo=eagle3")
    tiny_folders.refusal(lambda: load_eagle(target.path, target), "not an EAGLE head", "Qwen3ForCausalLM")


def test_pickle_that_runs_code_is_refused_and_does_not(tmp_path: Path, target: Target) -> None:
    marker = tmp_path / "executed"
    write_eagle(tmp_path / "head", EagleConfig(head_config()), pickled=True)
    (tmp_path / "head" / "pytorch_model.bin").write_bytes(f"cos\nsystem\n(S'touch {marker}'\ntR.".encode())
    tiny_folders.refusal(lambda: load_eagle(tmp_path / "head", target), "more than tensors", ".bin")
    assert not marker.exists()


def test_draft_has_the_targets_tokens(tmp_path: Path, target: Target) -> None:
    config = tiny_folders.small_config(num_layers=2, hidden_size=16)
    tiny_folders.write_target(tmp_path / "draft", config, seed=9)
    draft = load_draft(tmp_path / "draft", target)
    assert draft.config == config and draft.path == tmp_path / "draft"
    tiny_folders.write_tokenizer(
        tmp_path / "draft", special_tokens=("<|end|>", "<|assistant|>", "<|user|>", "<|mask|>")
    )
    tiny_folders.refusal(lambda: load_draft(tmp_path / "draft", target), "do not fit", "tokenizer")
    (tmp_path / "draft" / "tokenizer.json").unlink()
    tiny_folders.refusal(lambda: load_draft(tmp_path / "draft", target), "cannot be compared")


def test_draft_of_another_vocabulary(tmp_path: Path, target: Target) -> None:
    tiny_folders.write_target(tmp_path / "draft", tiny_folders.small_config(num_layers=2, vocab_size=300))
    tiny_folders.refusal(lambda: load_draft(tmp_path / "draft", target), "vocab_size", "272", "300")
