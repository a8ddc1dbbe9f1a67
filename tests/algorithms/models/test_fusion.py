"""The fused forward is torch's forward: same roundings, same captured layers, same texts."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from algorithms.engine.settings import RuntimeSettings
from algorithms.models.decoder import MAX_KERNEL_ROWS, Decoder
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.fusion import FusableModel
from experiments.app.hardware import resolve_hardware
from tests.algorithms import toy
from tests.algorithms.drafters import ALL_MAKERS, MAKERS, TARGET, TWINS, eagle3_head, eagle_head, hinted
from tests.algorithms.tiny_folders import randomise, small_config

pytestmark = pytest.mark.usefixtures("random_drafters")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = torch.tensor([[5, 9, 2, 7, 1]], device=DEVICE)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen2": dict(qkv_bias=True),
    "mistral": {},
    "biases": dict(architecture="llama", qkv_bias=True, o_bias=True, mlp_bias=True),
    "glm4": dict(qkv_bias=True, rotary_share=0.5, interleaved_rope=True, closing_norms=True),
    "tied": dict(architecture="qwen3", tie_word_embeddings=True),
}


def model_of(kind: str) -> Decoder:
    model = Decoder(small_config(**dict(dict(architecture=kind), **KINDS[kind]))).requires_grad_(False)
    randomise(model, 0)
    return model.to(DEVICE)


def outputs(model: Decoder, impl: str | None) -> list[Tensor]:
    """Logits, final hidden states and two captured layers."""
    model.set_forward(impl)
    hidden, features = model(TOKENS, DenseMixer(model.config, TOKENS.shape[1], DEVICE), target_layers=(2, 0))
    return [model.logits(hidden), hidden, *features]


@pytest.mark.parametrize(
    "kind, impl", [*((kind, "reference") for kind in KINDS), ("qwen3", "triton"), ("biases", "triton")]
)
def test_both_forwards_agree(kind: str, impl: str) -> None:
    """Sums of at most 64 float32 products in another order, through four layers; packed matrices alone reorder them.
    Afterwards torch's forward runs on views of the packed matrices."""
    model = model_of(kind)
    expected = outputs(model, None)
    for again in (outputs(model, impl), outputs(model, None)):
        for left, right in zip(again, expected, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5 * right.abs().max().item())


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_dflash_drafter_agrees(impl: str) -> None:
    drafter, generator = toy.random_drafter().to(DEVICE), torch.Generator().manual_seed(0)
    features = [torch.randn(1, 5, toy.CONFIG.hidden_size, generator=generator).to(DEVICE) for _ in range(2)]
    block = torch.randn(1, 4, toy.CONFIG.hidden_size, generator=generator).to(DEVICE)

    def computed() -> list[Tensor]:
        context = drafter.context(features, features[0])
        return [context, *drafter.context_kv(context), drafter(block, DenseMixer(drafter.config.decoder, 4, DEVICE))]

    expected = computed()
    drafter.set_forward(impl)
    for left, right in zip(computed(), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_likeliest_token_needs_no_logits(impl: str) -> None:
    """The lowest id of the largest logit; more rows than the kernel is for are left to the logits."""
    model = model_of("qwen3")
    hidden = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert model.argmax(hidden) is None
    model.set_forward(impl)
    found = model.argmax(hidden)
    assert found is not None and torch.equal(found, model.logits(hidden).argmax(-1))
    assert model.argmax(hidden.repeat(1, 13, 1)) is None
    assert model.argmax(hidden[:1, :1].expand(MAX_KERNEL_ROWS, 1, -1)) is not None
    model.set_forward(impl, batch_invariant=True)
    assert model.argmax(hidden.repeat(1, 13, 1)) is not None


def test_parameters_become_views_of_one_matrix() -> None:
    """Names and values stay, nothing is stored twice, and packing again changes nothing."""
    model = model_of("biases")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        model.set_forward("reference")
        after = model.state_dict()
        assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for projections in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        for name in ("weight", "bias"):
            owners = {getattr(projection, name).untyped_storage().data_ptr() for projection in projections}
            assert len(owners) == 1


class Reads(TorchFunctionMode):
    """Notes the storage of every tensor that an operation is given."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.storages |= {_storage(arg) for arg in args if type(arg) in (Tensor, nn.Parameter)}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "model",
    [toy.random_target().model, toy.random_drafter(), eagle_head(), eagle3_head()],
    ids=lambda model: type(model).__name__,
)
def test_a_rehearsal_multiplies_with_every_matrix(model: FusableModel) -> None:
    """On a GPU it compiles what runs later: a module left out would compile in the middle of a run."""
    model.set_forward("reference")
    with torch.inference_mode(), Reads() as reads:
        model.warmup(3)
    missed = [name for name, p in model.named_parameters() if p.ndim == 2 and _storage(p) not in reads.storages]
    assert not missed


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@cache
def written() -> list[list[int]]:
    return toy.answers(toy.requests(4, 12), toy.Setup(backend="torch"), TARGET)


@pytest.mark.parametrize("maker", [name for name in MAKERS if name not in TWINS] + ["autoregressive", "ngram"])
def test_every_algorithm_writes_the_targets_own_text(maker: str) -> None:
    """Token for token in float32: target and drafter fused, against the target alone by torch's forward."""
    asked = toy.requests(4, 12)
    alone = written()
    fused = toy.Setup(page_size=4, fused=True)
    got = toy.run(hinted(ALL_MAKERS[maker](), toy.scripts(asked, alone)), asked, fused, TARGET).completions
    assert [completion.token_ids for completion in got] == alone
    assert toy.run(toy.autoregressive(TARGET), toy.requests(1, 1), toy.Setup(), TARGET).completions, (
        "in torch's forward"
    )
    assert TARGET.model.impl is None


@pytest.mark.skipif(DEVICE == "cuda", reason="the toy target is on the CPU, where the kernels need the interpreter")
@pytest.mark.parametrize("maker", ["autoregressive", "dflash_chain", "eagle3_tree"])
def test_the_kernels_write_the_targets_own_text(maker: str) -> None:
    asked = toy.requests(1, 4)
    alone = toy.answers(asked, toy.Setup(backend="torch"), TARGET)
    setup = toy.Setup(impl="triton", fused=True, max_batch=1)
    got = toy.run(hinted(ALL_MAKERS[maker](), toy.scripts(asked, alone)), asked, setup, TARGET).completions
    assert [completion.token_ids for completion in got] == alone


@pytest.mark.parametrize(
    "dtype, impl, expected",
    [("bfloat16", "auto", "fused"), ("float32", "auto", "torch"), ("bfloat16", "reference", "torch")],
)
def test_the_forward_of_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch, dtype: str, impl: str, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_hardware(RuntimeSettings(dtype=dtype, impl=impl)).forward == expected
