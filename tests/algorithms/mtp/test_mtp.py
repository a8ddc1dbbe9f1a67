"""MTP heads in a target's own folder and in folders of speculators: what they draft, against the equations in float64,
and that outputs stay the target's."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from algorithms.models.architectures import ARCHITECTURES
from algorithms.models.config import DecoderConfig
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.loading import Target, load_target
from algorithms.mtp.config import BY_MODEL_TYPE, MTPConfig
from algorithms.mtp.drafting import MTP
from algorithms.mtp.loading import load_mtp
from algorithms.mtp.model import MTPHead
from tests.algorithms import tiny_folders
from tests.algorithms.dflash.published import DECODER, EPS, rms, self_attention, swiglu
from tests.algorithms.drafters import TARGET
from tests.algorithms.recorded import check_chains, check_distributions, check_kernels, check_trees, drafted
from tests.algorithms.toy import CONFIG, Setup

TEMPERATURE, STEPS = 0.7, 4
EAGER = Setup(max_batch=2, page_size=4)
MIMO = replace(CONFIG, architecture="mimo", qk_norm=False, qkv_bias=True)
PREFIX = "model.mtp_layers."


def layers_of(config: MTPConfig, prefix: str, seed: int = 5) -> dict[str, Tensor]:
    """Random tensors of a head under `prefix`."""
    head = MTPHead(config, CONFIG.num_layers).requires_grad_(False)
    tiny_folders.randomise(head, seed)
    return {name.replace("mtp_layers.", prefix, 1): tensor for name, tensor in head.state_dict().items()}


def write_mimo(folder: Path, layers: int = 1) -> Path:
    """A target in the layout of XiaomiMiMo/MiMo-7B."""
    model = tiny_folders.write_target(folder, MIMO)
    head = layers_of(MTPConfig(replace(MIMO, num_layers=layers), first="hidden"), PREFIX)
    tiny_folders.write_weights(folder, {**model.state_dict(), **head})
    tiny_folders.edit_json(folder / "config.json", num_nextn_predict_layers=layers)
    return folder


def write_speculators(folder: Path) -> Path:
    """A head of `TARGET` in the layout of speculators, whose config repeats the verifier's."""
    folder.mkdir()
    config = {
        "architectures": ["MTPDraftModel"],
        "num_nextn_predict_layers": 1,
        "speculators_config": {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]},
        "speculators_model_type": "mtp",
        "transformer_layer_config": {
            **DECODER,
            "num_hidden_layers": CONFIG.num_layers,
            "layer_types": ["full_attention"] * CONFIG.num_layers,
        },
    }
    tiny_folders.write_json(folder / "config.json", config)
    tiny_folders.write_weights(folder, layers_of(MTPConfig(replace(CONFIG, num_layers=1)), "mtp_layers."))
    return folder


class Original:
    """The head of a folder after a text: logits of each draft given those before it."""

    def __init__(
        self, target: Target, folder: Path, prefix: str, hidden_first: bool, raw_hidden: bool = False,
        raw_feedback: bool = False, norm_offset: float = 0.0,
    ) -> None:  # fmt: skip
        stored = load_file(folder / "model.safetensors")
        self.w = {name.removeprefix(prefix): w.double() for name, w in stored.items() if name.startswith(prefix)}
        if norm_offset:
            self.w = {name: w + norm_offset * ("norm" in name) for name, w in self.w.items()}
        self.target, self.hidden_first = target, hidden_first
        self.raw_hidden, self.raw_feedback = raw_hidden, raw_feedback
        self.count = len({name.split(".")[0] for name in self.w})

    def logits(self, text: list[int], drafts: list[int]) -> Tensor:
        """[D, V]."""
        model, config, rows = self.target.model, self.target.config, []
        assert model.lm_head is not None
        mixer = DenseMixer(config, len(text), "cpu")
        hidden, (last,) = model(torch.tensor([text]), mixer, (config.num_layers - 1,))
        features = (last if self.raw_hidden else hidden)[0, :-1].double()
        tokens, embedding = text[1:], model.model.embed_tokens.weight.double()
        for level in range(len(drafts)):
            w = {n.split(".", 1)[1]: each for n, each in self.w.items() if n.startswith(f"{level % self.count}.")}
            stream = self.layer(w, embedding[tokens], features)[-1:]
            normed = rms(stream, w["final_layernorm.weight"])
            rows.append(normed @ model.lm_head.weight.double().T)
            features = torch.cat([features, stream if self.raw_feedback else normed])
            tokens = [*tokens, drafts[level]]
        return torch.cat(rows)

    def layer(self, w: dict[str, Tensor], embedded: Tensor, features: Tensor) -> Tensor:
        halves = [rms(embedded, w["token_layernorm.weight"]), rms(features, w["hidden_layernorm.weight"])]
        x = torch.cat(halves[::-1] if self.hidden_first else halves, -1) @ w["input_proj.weight"].T
        at = torch.arange(len(x))
        x = x + self_attention(w, rms(x, w["input_layernorm.weight"]), at, at <= at[:, None])
        return x + swiglu(w, rms(x, w["post_attention_layernorm.weight"]))


@pytest.fixture(scope="module")
def mimo(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load_target(write_mimo(tmp_path_factory.mktemp("mimo")), "cpu", torch.float32)


Case = Callable[[Target, Path], tuple[Target, str | None, Original, dict[str, Any]]]


def own_folder(mimo: Target, folder: Path) -> Any:
    return mimo, None, Original(mimo, mimo.path, PREFIX, hidden_first=True), {}


def raw_streams(mimo: Target, folder: Path) -> Any:
    original = Original(mimo, mimo.path, PREFIX, hidden_first=True, raw_hidden=True, raw_feedback=True)
    return mimo, None, original, {"hidden_in": "raw", "feedback": "raw"}


def two_layers(mimo: Target, folder: Path) -> Any:
    target = load_target(write_mimo(folder / "two", layers=2), "cpu", torch.float32)
    return target, None, Original(target, target.path, PREFIX, hidden_first=True), {}


def of_speculators(mimo: Target, folder: Path) -> Any:
    path = write_speculators(folder / "head")
    return TARGET, str(path), Original(TARGET, path, "mtp_layers.", hidden_first=False, raw_hidden=True), {}


CASES = [own_folder, raw_streams, two_layers, of_speculators]


def made(target: Target, path: str | None, **config: Any) -> MTP:
    return MTP(MTP.Config(steps=STEPS, **config), target, path)


@pytest.mark.parametrize("case", CASES)
def test_greedy_chains(tmp_path: Path, mimo: Target, case: Case) -> None:
    target, path, original, config = case(mimo, tmp_path)
    setup = Setup(max_batch=3, page_size=1, graph="step")
    check_chains(drafted(made(target, path, **config), target, setup), original)


@pytest.mark.parametrize("case", CASES)
def test_the_distribution_of_a_sampled_chain(tmp_path: Path, mimo: Target, case: Case) -> None:
    target, path, original, config = case(mimo, tmp_path)
    drafts = drafted(made(target, path, draft_sampling="sample", **config), target, EAGER, TEMPERATURE)
    check_distributions(drafts, original, TEMPERATURE)


@pytest.mark.parametrize("case", [own_folder, two_layers])
def test_trees(tmp_path: Path, mimo: Target, case: Case) -> None:
    target, path, original, config = case(mimo, tmp_path)
    check_trees(drafted(made(target, path, topk=3, num_nodes=10, **config), target, EAGER, every=4), original)


def test_the_kernels_draft_the_same(mimo: Target) -> None:
    check_kernels(lambda: MTP(MTP.Config(steps=2), mimo, None), mimo, fused=True)


def test_norms_that_are_stored_as_differences(mimo: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(BY_MODEL_TYPE["mimo"], norm_offset=1.0)
    monkeypatch.setitem(BY_MODEL_TYPE, "mimo", family)
    original = Original(mimo, mimo.path, PREFIX, hidden_first=True, norm_offset=1.0)
    check_chains(drafted(made(mimo, None), mimo, Setup()), original)


def test_mimo_is_qwen2_with_layers_that_are_not_the_targets(mimo: Target) -> None:
    assert replace(ARCHITECTURES["mimo"], hf_class="Qwen2ForCausalLM", mtp_prefix=None) == ARCHITECTURES["qwen2"]
    published = {**MIMO.to_hf(), "model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True}
    assert DecoderConfig.from_hf(published) == MIMO and MIMO.rms_norm_eps == EPS
    assert not any("mtp" in name for name in mimo.model.state_dict())


@pytest.mark.parametrize(
    ("edits", "parts"),
    [
        ({"0__input_proj__weight": None}, ("lack tensors", "input_proj")),
        ({"0__self_attn__q_proj__weight": torch.zeros(64, 64)}, ("q_proj", "[64, 32]", "[64, 64]")),
        ({"0__eh_proj__weight": torch.zeros(32, 64)}, ("unknown", "eh_proj")),
        ({"1__input_proj__weight": torch.zeros(32, 64)}, ("num_nextn_predict_layers=1", "2")),
    ],
)
def test_unfit_layers_are_refused(tmp_path: Path, edits: dict[str, Any], parts: tuple[str, ...]) -> None:
    folder = write_mimo(tmp_path / "mimo")
    target = load_target(folder, "cpu", torch.float32)
    tiny_folders.change_weights(folder, **{f"model__mtp_layers__{name}": tensor for name, tensor in edits.items()})
    tiny_folders.refusal(lambda: load_mtp(None, target), *parts)


def test_a_target_without_a_head_is_refused(tmp_path: Path, mimo: Target) -> None:
    tiny_folders.write_target(tmp_path / "target")
    target = load_target(tmp_path / "target", "cpu", torch.float32)
    tiny_folders.refusal(lambda: load_mtp(None, target), "the target has no MTP head", "mimo", "qwen3")
    tiny_folders.refusal(lambda: load_mtp(tmp_path / "target", mimo), "not an MTP head", "speculators")
    tiny_folders.write_target(tmp_path / "mimo", MIMO)
    bare = load_target(tmp_path / "mimo", "cpu", torch.float32)
    tiny_folders.refusal(lambda: load_mtp(None, bare), "the target has no MTP head", PREFIX)
    head = write_speculators(tmp_path / "head")
    tiny_folders.refusal(lambda: load_mtp(head, target), "do not fit", "vocab_size")
