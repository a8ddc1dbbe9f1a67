"""Keys and values in float8: lossless against autoregressive decoding with the same cache, on both backends."""

from functools import cache

import pytest
import torch

from algorithms.attention.backends.protocol import BackendError
from algorithms.attention.backends.torch import TorchBackend
from algorithms.attention.cache import KVScales
from algorithms.engine.engine import Engine
from algorithms.engine.request import Request
from algorithms.engine.settings import RuntimeSettings
from specdec_kernels import AttentionShape
from tests.algorithms import toy
from tests.algorithms.drafters import ALL_MAKERS, TARGET, hinted

pytestmark = pytest.mark.usefixtures("random_drafters")

E4M3 = torch.float8_e4m3fn


def factors(k_scale: float = 0.03, v_scale: float = 0.05) -> KVScales:
    """Factors that differ from layer to layer and from head to head."""
    shape = (toy.CONFIG.num_layers, toy.CONFIG.num_kv_heads)
    steps = 1 + 0.25 * torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    return KVScales(k_scale * steps, v_scale * steps)


@cache
def written() -> tuple[list[Request], list[list[int]]]:
    """Requests, and what the target writes with such a cache alone."""
    asked = [toy.changed(request, temperature=(0.0, 0.9)[request.id % 2]) for request in toy.requests(4, 10)]
    return asked, toy.answers(
        asked, toy.Setup(backend="torch", kv_dtype=E4M3, kv_scales=factors(), max_batch=1), TARGET
    )


@pytest.mark.parametrize(
    ("maker", "backend"),
    [(maker, "fa4") for maker in ("eagle_tree", "peagle_tree", "standalone_tree", "dflash_tree", "dflash_window")]
    + [("autoregressive", "torch"), ("dflash_chain", "torch"), ("eagle3_tree", "hybrid")],
)
def test_output_is_that_of_the_target_with_the_same_cache(maker: str, backend: str) -> None:
    asked, alone = written()
    setup = toy.Setup(backend=backend, kv_dtype=E4M3, kv_scales=factors(), max_batch=2)
    algorithm = hinted(ALL_MAKERS[maker](), toy.scripts(asked, alone))
    assert [completion.token_ids for completion in toy.run(algorithm, asked, setup, TARGET).completions] == alone


def stored(engine: Engine, layer: int) -> torch.Tensor:
    """[2, pages, page_size, H_kv, D] float32: keys and values of one layer, times their factors."""
    cache = engine.parts.memory.cache
    assert cache.scales is not None
    scale = torch.stack(list(cache.scales.of_layer(layer)))[:, None, None, :, None]
    return cache.kv[layer].float() * scale


def test_the_cache_holds_what_a_wide_cache_holds_to_the_precision_of_e4m3() -> None:
    """Prompts alone: the keys of layer 0 do not depend on what was stored before them."""
    asked = toy.requests(3, max_new_tokens=1)
    wide = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(), TARGET)
    narrow = toy.engine_of(toy.autoregressive(TARGET), toy.Setup(kv_dtype=E4M3, kv_scales=factors()), TARGET)
    for engine in (wide, narrow):
        engine.generate(asked)
    expected, found = wide.parts.memory.cache.kv[0], stored(narrow, 0)
    # Three bits behind the leading one, and half the smallest number of e4m3 times the largest factor.
    error, bound = (found - expected).abs(), expected.abs() / 16 + 2.0**-10 * 0.5
    assert (error <= bound).all() and error.max() > 0
    assert narrow.parts.memory.cache.kv.dtype == E4M3


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_kernels_and_reference_write_the_same_with_factors(impl: str) -> None:
    asked = toy.requests(2, 4)
    setup = toy.Setup(kv_dtype=E4M3, kv_scales=factors(), impl=impl)
    plain = toy.Setup(backend="torch", kv_dtype=E4M3, kv_scales=factors(), max_batch=1)
    assert toy.answers(asked, setup, TARGET) == toy.answers(asked, plain, TARGET)


def test_backends_are_asked_about_the_cache_before_anything_runs() -> None:
    class HalfPrecisionOnly(TorchBackend):
        def refuse(self, shape: AttentionShape, *call: object) -> str | None:
            return None if shape.kv_dtype == shape.dtype else f"it reads no {shape.kv_dtype}"

    backend = HalfPrecisionOnly(TorchBackend.Config(), "reference")
    Engine(TARGET, toy.autoregressive(TARGET), backend, RuntimeSettings(max_length=64, impl="reference"), toy.spell)
    with pytest.raises(BackendError, match="it reads no torch.float8_e4m3fn"):
        settings = RuntimeSettings(max_length=64, impl="reference", kv_dtype="fp8_e4m3")
        Engine(TARGET, toy.autoregressive(TARGET), backend, settings, toy.spell)
