"""Checkpoints: what their headers say, what loads, and that each damaged or unfit folder is refused with the file, the
tensor and the fix."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from algorithms.dflash.config import DFlashConfig
from algorithms.dflash.loading import load_dflash
from algorithms.models import folder as folder_module
from algorithms.models.config import DecoderConfig
from algorithms.models.folder import ModelError
from algorithms.models.loading import Target, load_target, resolve_folder
from algorithms.models.loading.stored import stored_tensors, without_model
from tests.algorithms import tiny_folders

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    return load_target(folder, "cpu", dtype)


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    tiny_folders.write_target(tmp_path / "target")
    return tmp_path / "target"


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Path:
    tiny_folders.write_dflash(tmp_path / "drafter", tiny_folders.small_dflash_config(tiny_folders.small_config()))
    return tmp_path / "drafter"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_arrive_unchanged_and_frozen(tmp_path: Path, shards: int, tied: bool) -> None:
    written = tiny_folders.write_target(tmp_path, tiny_folders.small_config(tie_word_embeddings=tied), shards=shards)
    loaded = load(tmp_path).model
    state = loaded.state_dict()
    assert state.keys() == written.state_dict().keys()
    for name, tensor in written.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert not loaded.training


def test_bfloat16_weights_are_widened_exactly(tmp_path: Path) -> None:
    written = tiny_folders.write_target(tmp_path, dtype=torch.bfloat16)
    loaded = load(tmp_path).model
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, written.state_dict()[name].float())


def test_known_harmless_tensors_are_ignored(tmp_path: Path) -> None:
    tiny_folders.write_target(tmp_path, tiny_folders.small_config(tie_word_embeddings=True))
    tiny_folders.change_weights(
        tmp_path, lm_head__weight=torch.ones(272, 32), model__rotary_emb__inv_freq=torch.ones(8)
    )
    assert load(tmp_path).model.lm_head is None


def test_folder_without_config(target_folder: Path) -> None:
    (target_folder / "config.json").unlink()
    tiny_folders.refusal(lambda: load(target_folder), "config.json is missing", str(target_folder))


@pytest.mark.parametrize(
    ("content", "part"),
    [("{", "not valid JSON"), ("[1]", "no mapping"), ('{"model_type": "qwen3"}', "'hidden_size' is missing")],
)
def test_malformed_config(target_folder: Path, content: str, part: str) -> None:
    (target_folder / "config.json").write_text(content)
    tiny_folders.refusal(lambda: load(target_folder), part, "config.json")


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "mamba"},
        {"num_attention_heads": "four"},
        {"num_key_value_heads": 3},
        {"vocab_size": None},
        {"hidden_size": [32]},
        {"hidden_size": 2**63},
        {"head_dim": 0.5},
        {"num_hidden_layers": 10_000_000},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": 0, "rope_parameters": None},
        {"rope_parameters": {"rope_theta": float("nan")}},
        {"rope_parameters": "default"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 0}},
        {"layer_types": 7},
        {"eos_token_id": "end"},
    ],
)
def test_unusable_config_values(target_folder: Path, change: dict[str, Any]) -> None:
    """Each in a message, and before a model of that size is built."""
    tiny_folders.edit_json(target_folder / "config.json", **change)
    tiny_folders.refusal(lambda: load(target_folder), "config.json")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"model_type": "llama", "use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        ({"model_type": "llama", "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding-window"),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "use_sliding_window"),
        ({"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "chunked_attention"),
        ({"model_type": "mistral", "layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_features_that_would_be_left_out_in_silence(target_folder: Path, change: dict[str, Any], part: str) -> None:
    tiny_folders.edit_json(target_folder / "config.json", **change)
    tiny_folders.refusal(lambda: load(target_folder), "not supported", part)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "llama", "sliding_window": None},
        {"model_type": "llama", "sliding_window": 64, "layer_types": ["full_attention"] * 4},
        {"sliding_window": 64, "max_window_layers": 4},
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ],
)
def test_a_window_that_no_layer_has_is_no_reason_to_refuse(target_folder: Path, change: dict[str, Any]) -> None:
    raw = json.loads((target_folder / "config.json").read_text())
    raw.pop("layer_types", None)
    config = DecoderConfig.from_hf({**raw, "use_sliding_window": True, **change})
    assert config.sliding_windows == ()


def test_folder_without_weights(target_folder: Path) -> None:
    (target_folder / WEIGHTS).rename(target_folder / "adapter.safetensors")
    tiny_folders.refusal(lambda: load(target_folder), "no weights", "model.safetensors", "adapter.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unopened(target_folder: Path, name: str) -> None:
    marker = target_folder / "executed"
    payload = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    (target_folder / WEIGHTS).unlink()
    (target_folder / name).write_bytes(payload)
    tiny_folders.refusal(lambda: load(target_folder), "pickle", name, "safetensors")
    assert not marker.exists()


@pytest.mark.parametrize("shard", ["shard.bin", "../other/model.safetensors", "/etc/model.safetensors", 5, None, ["x"]])
def test_an_index_names_safetensors_files_of_its_folder(tmp_path: Path, shard: Any) -> None:
    tiny_folders.write_target(tmp_path / "other")
    tiny_folders.write_target(tmp_path / "model", shards=2)
    index = json.loads((tmp_path / "model" / INDEX).read_text())["weight_map"]
    tiny_folders.edit_json(tmp_path / "model" / INDEX, weight_map={name: shard for name in index})
    tiny_folders.refusal(lambda: load(tmp_path / "model"), str(shard), INDEX)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    tiny_folders.write_target(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    tiny_folders.refusal(lambda: load(tmp_path), "shard", "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "in the length", "in the header", "in the data"])
def test_truncated_weights(target_folder: Path, keep: int) -> None:
    content = (target_folder / WEIGHTS).read_bytes()
    (target_folder / WEIGHTS).write_bytes(content[:keep])
    tiny_folders.refusal(lambda: load(target_folder), "truncated or corrupt", str(target_folder / WEIGHTS))


@pytest.mark.parametrize(
    ("changes", "dtype", "parts"),
    [
        ({"model__norm__weight": torch.full((32,), float("nan"))}, "float32", ("model.norm.weight", "NaN or infinity")),
        ({"model__norm__weight": torch.full((32,), float("-inf"))}, "float32", ("model.norm.weight", "NaN or inf")),
        ({"model__norm__weight": torch.full((32,), 1e6)}, "float16", ("model.norm.weight", "does not fit torch.float")),
        ({"model__norm__weight": torch.zeros(32).char()}, "float32", ("model.norm.weight", "dtype", "I8")),
        ({"model__layers__1__mlp__up_proj__weight": torch.zeros(48, 31)}, "float32", ("[48, 32]", "[48, 31]")),
        ({"model__layers__2__self_attn__q_norm__weight": None}, "float32", ("lack tensors", "2.self_attn.q_norm")),
        ({"lm_head__weight": None}, "float32", ("lack tensors", "lm_head.weight")),
        ({"model__layers__0__mlp__router__weight": torch.zeros(4)}, "float32", ("unknown", "0.mlp.router.weight")),
    ],
)
def test_unfit_tensors(target_folder: Path, changes: Any, dtype: str, parts: tuple[str, ...]) -> None:
    tiny_folders.change_weights(target_folder, **changes)
    tiny_folders.refusal(lambda: load(target_folder, getattr(torch, dtype)), *parts)


def test_nothing_is_read_before_all_headers_fit(target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from algorithms.models.loading import weights

    def forbidden(*_: Any) -> torch.Tensor:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(weights, "_read", forbidden)
    tiny_folders.change_weights(target_folder, model__norm__weight=torch.zeros(31))
    tiny_folders.refusal(lambda: load(target_folder), "model.norm.weight")


def test_path_that_does_not_exist(tmp_path: Path) -> None:
    tiny_folders.refusal(lambda: load(tmp_path / "nowhere"), str(tmp_path / "nowhere"))


def test_misspelt_relative_path_is_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets").mkdir()
    monkeypatch.setattr(folder_module, "_download", lambda name: pytest.fail("the hub was asked"))
    tiny_folders.refusal(lambda: resolve_folder("assets/tiyn"), "assets/tiyn")


def test_hub_name_is_downloaded_without_pickles(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.update(name=name, patterns=allow_patterns)
        return str(target_folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve_folder("some-org/some-model") == target_folder
    assert asked == {"name": "some-org/some-model", "patterns": ["*.safetensors", "*.json", "*.jinja"]}


def test_hub_failure_names_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    tiny_folders.refusal(lambda: resolve_folder("some-org/some-model"), "some-org/some-model", "no route to host")


@pytest.mark.parametrize("prefix", ["", "model."])
def test_drafter_loads_with_and_without_prefix(tmp_path: Path, target_folder: Path, prefix: str) -> None:
    written = tiny_folders.write_dflash(
        tmp_path / "drafter", tiny_folders.small_dflash_config(tiny_folders.small_config()), prefix=prefix
    )
    drafter = load_dflash(tmp_path / "drafter", load(target_folder))
    for name, tensor in written.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], tensor), name
    assert not any(parameter.requires_grad for parameter in drafter.parameters())


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("hidden_size", 64, ("hidden_size", "32", "64")),
        ("vocab_size", 300, ("vocab_size", "272", "300")),
        ("num_target_layers", 6, ("num_target_layers", "4", "6")),
    ],
)
def test_drafter_of_another_target(
    target_folder: Path, drafter_folder: Path, key: str, value: int, parts: tuple[str, ...]
) -> None:
    tiny_folders.edit_json(drafter_folder / "config.json", **{key: value})
    target = load(target_folder)
    message = tiny_folders.refusal(lambda: load_dflash(drafter_folder, target), "do not fit", *parts)
    expected, actual = (line.split(":")[1].strip() for line in message.splitlines()[2:4])
    assert [expected, actual] == list(parts[1:])


@pytest.mark.parametrize(
    ("nested", "parts"),
    [
        ({"mask_token_id": 3, "target_layer_ids": [1, 4]}, ("target_layer_ids", "0 to 3", "[1, 4]")),
        ({"mask_token_id": 3, "target_layer_ids": [-2, 1]}, ("target_layer_ids", "0 to 3", "[-2, 1]")),
        ({"mask_token_id": 273, "target_layer_ids": [1, 2]}, ("mask_token_id", "273")),
        ({"mask_token_id": 3, "target_layer_ids": [1, 2, 3]}, ("'fc.weight'", "[32, 96]", "[32, 64]")),
        ({"target_layer_ids": [1, 2]}, ("not a DFlash drafter", "mask_token_id")),
        ({"mask_token_id": 3, "selector_rank": 64}, ("DFlash 2: expected the keys", "no selector_top_k, conv_kernel")),
        ({"mask_token_id": 3, "shift_label": True}, ("not supported", "shift_label=True")),
        ({"mask_token_id": 3, "logit_scale": 0.5}, ("not supported", "logit_scale=0.5")),
        ({"mask_token_id": 3, "causal_head": True, "causal": False}, ("causal and causal_head", "False, True")),
        ({"mask_token_id": 3, "slots": "first"}, ("slots: expected one of own, next", "'first'")),
        ({"mask_token_id": 3, "confidence_head_with_markov": True, "enable_confidence_head": True}, ("markov_rank 0",)),
        ({"mask_token_id": 3, "markov_rank": 4, "markov_head_type": "lstm"}, ("vanilla, gated, rnn", "'lstm'")),
        ({"mask_token_id": 3, "target_hidden_size": 48}, ("target_hidden_size", "32", "48")),
        ({"mask_token_id": 3, "is_neox_style": False}, ("not supported", "is_neox_style=False")),
        ({"mask_token_id": 3, "speculators_model_type": "dflash"}, ("not supported", "speculators_model_type=dflash")),
        ({"mask_token_id": 3, "draft_vocab_size": 100}, ("do not fit", "draft_vocab_size without", "272", "100")),
        ({"mask_token_id": 3, "use_swa": True}, ("positive sliding_window",)),
        ({"mask_token_id": 3, "causal": True, "is_causal": False}, ("causal and is_causal", "True, False")),
        ({"mask_token_id": 3, "final_logit_softcapping": -1.0}, ("final_logit_softcapping: expected above 0",)),
        (7, ("dflash_config: expected a mapping, got 7",)),
    ],
)
def test_unusable_dflash_config(target_folder: Path, drafter_folder: Path, nested: Any, parts: tuple[str, ...]) -> None:
    """What is not understood is refused: read as z-lab's drafter, it would draft wrong tokens."""
    tiny_folders.edit_json(drafter_folder / "config.json", dflash_config=nested)
    target = load(target_folder)
    tiny_folders.refusal(lambda: load_dflash(drafter_folder, target), *parts)


SLIDING = ["full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("keys", "windows", "causal"),
    [
        ({}, (), (False, False)),
        ({"causal": True}, (), (True, True)),
        ({"use_swa": True, "swa_window_size": 9}, (9, 9), (False, False)),
        ({"use_swa": True, "swa_window_size": 9, "is_causal": True}, (9, 9), (True, True)),
        ({"layer_types": SLIDING, "sliding_window": 7}, (None, 7), (False, True)),
        ({"layer_types": SLIDING, "sliding_window": 7, "causal": False}, (None, 7), (False, False)),
        ({"layer_types": SLIDING, "use_swa": True, "swa_window_size": 9}, (None, 9), (False, True)),
        ({"layer_types": SLIDING, "sliding_window": 7, "swa_window_size": 9}, (None, 9), (False, True)),
        ({"use_swa": False, "swa_window_size": 9, "shift_label": False, "is_neox_style": True}, (), (False, False)),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 7}, (), (False, False)),
    ],
)
def test_dflash_keys_about_attention(keys: dict[str, Any], windows: tuple[int, ...], causal: tuple[bool, ...]) -> None:
    """What other engines write into `dflash_config` decides, and survives being written again."""
    written = tiny_folders.small_dflash_config(tiny_folders.small_config()).to_hf()
    nested = {key: value for key, value in keys.items() if key not in ("layer_types", "sliding_window")}
    merged = {**written, **keys, "dflash_config": {**written["dflash_config"], **nested}}
    read = DFlashConfig.from_hf(merged)
    assert (read.decoder.sliding_windows, read.causal_layers) == (windows, causal)
    assert DFlashConfig.from_hf(read.to_hf()) == read


def test_dflash_layers_and_cap_by_their_other_names() -> None:
    written = tiny_folders.small_dflash_config(tiny_folders.small_config()).to_hf()
    nested = {"mask_token_id": 3, "layer_ids": [0, 3], "final_logit_softcapping": 30.0}
    read = DFlashConfig.from_hf({**written, "dflash_config": nested})
    assert (read.target_layer_ids, read.logit_soft_cap) == ((0, 3), 30.0)
    assert DFlashConfig.from_hf(read.to_hf()) == read


def test_target_given_as_drafter(target_folder: Path) -> None:
    target = load(target_folder)
    tiny_folders.refusal(lambda: load_dflash(target_folder, target), "not a DFlash drafter", "Qwen3ForCausalLM")


def test_other_tokenizer_of_equal_size_does_not_fit(target_folder: Path, drafter_folder: Path) -> None:
    tiny_folders.write_tokenizer(drafter_folder, special_tokens=("<|end|>", "<|assistant|>", "<|user|>", "<|mask|>"))
    target = load(target_folder)
    tiny_folders.refusal(lambda: load_dflash(drafter_folder, target), "tokenizer", "260 tokens")


def test_duplicate_names_under_the_optional_prefix(target_folder: Path, drafter_folder: Path) -> None:
    tensors = load_file(drafter_folder / WEIGHTS)
    tiny_folders.write_weights(drafter_folder, {**tensors, "model.fc.weight": torch.zeros(32, 64)})
    target = load(target_folder)
    tiny_folders.refusal(lambda: load_dflash(drafter_folder, target), "twice", "fc.weight and model.fc.weight")


TENSORS = {
    "model.fc.weight": torch.arange(6.0).view(2, 3).half(),
    "norm.weight": torch.ones(3),
    "d2t": torch.tensor([4, 7]),
}
SAID = {"fc.weight": ((2, 3), "F16"), "norm.weight": ((3,), "F32"), "d2t": ((2,), "I64")}


@pytest.mark.parametrize("pickled", [False, True])
def test_a_file_says_what_it_holds(tmp_path: Path, pickled: bool) -> None:
    """Names are without the prefix, and a tensor knows the one that the file has for it."""
    path = tmp_path / ("pytorch_model.bin" if pickled else "model.safetensors")
    torch.save(TENSORS, path) if pickled else save_file(TENSORS, path)
    found = stored_tensors(tmp_path, without_model, pickles=pickled)
    assert {name: (each.shape, each.dtype) for name, each in found.items()} == SAID
    for each in found.values():
        assert each.file == path and torch.equal(each.read(), TENSORS[each.name])
    assert {each.name for each in found.values()} == set(TENSORS)


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    names = list(TENSORS)
    for number, part in enumerate((names[:1], names[1:])):
        save_file({name: TENSORS[name] for name in part}, tmp_path / f"part-{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.fc.weight": "part-0.safetensors", "d2t": "part-1.safetensors"}}')
    found = stored_tensors(tmp_path)
    assert {name: each.file.name for name, each in found.items()} == {
        "model.fc.weight": "part-0.safetensors",
        "d2t": "part-1.safetensors",
    }
    index.write_text('{"weight_map": {"d2t": "part-0.safetensors"}}')
    with pytest.raises(ModelError, match="tensor 'd2t' is missing from its shard"):
        stored_tensors(tmp_path)
