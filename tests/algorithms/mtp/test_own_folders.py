"""MTP heads of published targets, in the targets' own folders: what they draft, against plain equations around the
decoder layer of transformers, and that outputs stay the target's."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from algorithms.models.loading import Target, load_target, read_target
from algorithms.mtp.config import BY_MODEL_TYPE
from algorithms.mtp.drafting import MTP
from algorithms.mtp.loading import load_mtp, read_mtp
from tests.algorithms.models.test_architectures import EXPERTS, HYBRID, LATENT, LINEAR, NEXT, theirs
from tests.algorithms.recorded import check_chains, check_distributions, check_kernels, check_trees, drafted
from tests.algorithms.tiny_folders import change_weights, edit_json, randomise, refusal
from tests.algorithms.toy import Setup

STEPS, TEMPERATURE, LAYERS = 3, 0.8, 4
EAGER = Setup(max_batch=2, page_size=4)
SMALL: dict[str, Any] = {"hidden_size": 32, "vocab_size": 61}
QWEN = {
    "fc": "fc", "embedding": "pre_fc_norm_embedding", "hidden": "pre_fc_norm_hidden", "norm": "norm",
    "layer": "layers.0.",
}  # fmt: skip
DEEPSEEK = {"fc": "eh_proj", "embedding": "enorm", "hidden": "hnorm", "norm": "shared_head.norm", "layer": ""}
ONE = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
ALL_EXPERTS = {"num_hidden_layers": 1, "first_k_dense_replace": 0}


@dataclass(frozen=True)
class Published:
    """A target, the changes of its config that give the MTP layer, and the conventions of the head."""

    model_type: str
    keys: dict[str, Any]
    of_layer: dict[str, Any]
    names: dict[str, str]
    prefix: str
    raw_hidden: bool = False
    raw_feedback: bool = False
    own_head: bool | None = None
    """Whether the folder repeats the target's LM head (False), or has another (True)."""


NEXT_LAYER = f"model.layers.{LAYERS}."
GLM = {**EXPERTS, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": True}
HEADS = {
    "Qwen3-Next": Published("qwen3_next", {**NEXT, "layer_types": HYBRID}, ONE, QWEN, "mtp."),
    "Qwen3-Next dense": Published(
        "qwen3_next", {**NEXT, "layer_types": HYBRID}, {**ONE, "mlp_only_layers": [0]}, QWEN, "mtp."
    ),
    "Qwen3.5": Published("qwen3_5_text", {**LINEAR, "layer_types": HYBRID}, ONE, QWEN, "mtp."),
    "DeepSeek-V3": Published(
        "deepseek_v3", {**LATENT, **EXPERTS, "norm_topk_prob": True}, ALL_EXPERTS, DEEPSEEK, NEXT_LAYER, True, True,
        own_head=False,
    ),
    "GLM-4.5": Published("glm4_moe", GLM, ALL_EXPERTS, DEEPSEEK, NEXT_LAYER, True, own_head=True),
    "GLM-4.7-Flash": Published(
        "glm4_moe_lite", {**LATENT, **EXPERTS}, {**ALL_EXPERTS, "mlp_layer_types": ["sparse"]}, DEEPSEEK, NEXT_LAYER,
        True,
    ),
}  # fmt: skip


class Original:
    """A target and its head of random weights, and the folder of both."""

    @torch.no_grad()
    def __init__(self, name: str) -> None:
        self.head = head = HEADS[name]
        self.main = theirs(head.model_type, **head.keys)
        self.block = theirs(head.model_type, **{**head.keys, **head.of_layer})
        randomise(self.block, seed=8)
        self.fc = torch.nn.Linear(64, 32, bias=False)
        kind, eps = type(self.block.model.norm), self.main.config.rms_norm_eps
        self.norms = {name: kind(32, eps) for name in ("embedding", "hidden", "norm")}
        for seed, module in enumerate([self.fc, *self.norms.values()]):
            randomise(torch.nn.ModuleDict({"norm": module}) if module is not self.fc else module, seed)
        self.own = torch.randn(61, 32, generator=torch.Generator().manual_seed(9)) * 0.3
        self._place = TemporaryDirectory()
        self.folder = Path(self._place.name)
        self._write()

    @property
    def lm_head(self) -> Tensor:
        return self.own if self.head.own_head else self.main.lm_head.weight

    def _write(self) -> None:
        head, names = self.head, self.head.names
        self.block.save_pretrained(self.folder)
        layer = load_file(self.folder / "model.safetensors")
        self.main.save_pretrained(self.folder)
        edit_json(self.folder / "config.json", num_nextn_predict_layers=1)
        more = {f"{names['fc']}.weight": self.fc.weight.data}
        more |= {f"{names[name]}.weight": norm.weight.data for name, norm in self.norms.items()}
        start = "model.layers.0."
        more |= {names["layer"] + n.removeprefix(start): w for n, w in layer.items() if n.startswith(start)}
        if head.own_head is not None:
            more |= {"shared_head.head.weight": self.lm_head.data.clone()}
            more |= {"embed_tokens.weight": self.main.model.embed_tokens.weight.data.clone()}
        stored = load_file(self.folder / "model.safetensors")
        save_file(stored | {head.prefix + name: w for name, w in more.items()}, self.folder / "model.safetensors")

    @torch.no_grad()
    def logits(self, text: list[int], drafts: list[int]) -> Tensor:
        """[D, V]: of each draft, given those before it."""
        head, main, rows = self.head, self.main.model, []
        features, tokens = self._of_target(*text)[head.raw_hidden][0, :-1], text[1:]
        for draft in drafts:
            embedded = self.norms["embedding"](main.embed_tokens(torch.tensor(tokens)))
            x = self.fc(torch.cat([embedded, self.norms["hidden"](features)], -1))
            stream = self._layer(x)
            normed = self.norms["norm"](stream)
            rows.append(normed @ self.lm_head.T)
            features = torch.cat([features, stream if head.raw_feedback else normed])
            tokens = [*tokens, draft]
        return torch.cat(rows)

    @cache  # noqa: B019
    def _of_target(self, *text: int) -> tuple[Tensor, Tensor]:
        """Hidden states behind the final norm of the target, and before it."""
        raw: list[Tensor] = []
        hook = self.main.model.norm.register_forward_pre_hook(lambda _, inputs: raw.append(inputs[0]))
        hidden = self.main.model(torch.tensor([text])).last_hidden_state
        hook.remove()
        return hidden, raw[0]

    def _layer(self, x: Tensor) -> Tensor:
        """The last row of the decoder layer over x [T, hidden]."""
        streams: list[Tensor] = []
        hook = self.block.model.norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
        self.block.model(inputs_embeds=x[None])
        hook.remove()
        return streams[0][0, -1:]


@cache
def original(name: str) -> tuple[Original, Target]:
    found = Original(name)
    return found, load_target(found.folder, "cpu", torch.float32)


def made(target: Target, **config: Any) -> MTP:
    return MTP(MTP.Config(steps=STEPS, **config), target, None)


@pytest.mark.parametrize("name", ["Qwen3-Next", "GLM-4.5"])
def test_greedy_chains(name: str) -> None:
    reference, target = original(name)
    check_chains(drafted(made(target), target, Setup(max_batch=2, page_size=4, graph="step")), reference)


@pytest.mark.parametrize("name", HEADS)
def test_the_distribution_of_a_sampled_chain(name: str) -> None:
    reference, target = original(name)
    drafts = drafted(made(target, draft_sampling="sample"), target, EAGER, TEMPERATURE)
    check_distributions(drafts, reference, TEMPERATURE)


@pytest.mark.parametrize("name", ["Qwen3-Next", "DeepSeek-V3", "GLM-4.5"])
def test_trees(name: str) -> None:
    reference, target = original(name)
    check_trees(drafted(made(target, topk=3, num_nodes=9), target, EAGER, every=5), reference)


@pytest.mark.parametrize("name", ["Qwen3-Next", "DeepSeek-V3"])
def test_the_kernels_draft_the_same(name: str) -> None:
    _, target = original(name)
    check_kernels(lambda: MTP(MTP.Config(steps=2), target, None), target, fused=True)


def test_copies_of_the_targets_tables_are_dropped() -> None:
    found = {name: load_mtp(None, original(name)[1]) for name in ("DeepSeek-V3", "GLM-4.5")}
    assert found["DeepSeek-V3"].lm_head is None and found["GLM-4.5"].lm_head is not None
    assert all(head.embed_tokens is None for head in found.values())


def test_every_family_has_the_prefix_that_its_target_leaves_out() -> None:
    assert {head.model_type for head in HEADS.values()} == set(BY_MODEL_TYPE) - {"mimo"}
    for name in HEADS:
        reference, target = original(name)
        assert read_mtp(None, target).family.prefix == reference.head.prefix
        assert len(list(target.model.model.layers)) == LAYERS


@pytest.mark.parametrize(
    ("name", "keys", "tensors", "parts"),
    [
        ("Qwen3.5", {"mtp_num_hidden_layers": 2, "num_nextn_predict_layers": None}, {}, ("one MTP layer", "2 MTP")),
        ("Qwen3.5", {"mtp_use_dedicated_embeddings": True}, {}, ("mtp_use_dedicated_embeddings",)),
        ("Qwen3.5", {}, {"mtp__layers__0__linear_attn__A_log": torch.zeros(4)}, ("not supported", "linear attention")),
        ("Qwen3.5", {}, {"mtp__fc__weight": None}, ("lack tensors", "input_proj")),
        ("Qwen3.5", {}, {"mtp__layers__1__input_layernorm__weight": torch.zeros(32)}, ("unknown", "mtp.layers.1")),
        ("Qwen3-Next", {}, {"mtp__fc__weight": torch.zeros(32, 32)}, ("mtp.fc.weight", "[32, 64]", "[32, 32]")),
        ("GLM-4.5", {}, {f"model__layers__{LAYERS}__eh_proj__weight": torch.zeros(32, 64, 1)}, ("eh_proj",)),
    ],
)
def test_unfit_heads_are_refused(
    tmp_path: Path, name: str, keys: dict[str, Any], tensors: dict[str, Any], parts: tuple[str, ...]
) -> None:
    """By name; what config and headers show without reading a weight, and the rest as the head loads."""
    reference, _ = original(name)
    for file in reference.folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_json(tmp_path / "config.json", **keys)
    change_weights(tmp_path, **tensors)
    target = load_target(tmp_path, "cpu", torch.float32)
    refusal(lambda: load_mtp(None, target), *parts)
    if keys or "not supported" in parts:
        refusal(lambda: read_mtp(None, read_target(tmp_path)), *parts)
