"""Decoding from Python, see `docs/python.md`; `run.py` builds its runs from the same functions. No heavy package is
imported before a function is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from algorithms.engine.request import Request
from algorithms.engine.settings import WEIGHT_DTYPES
from algorithms.lazy import torch
from algorithms.registry import available, configured
from algorithms.step.sampling_params import SamplingParams
from specdec_kernels.checks import expect_choice

if TYPE_CHECKING:
    from algorithms.algorithm import Algorithm
    from algorithms.attention.backends.protocol import Backend
    from algorithms.engine.session import Generation
    from algorithms.models.loading import Target
    from algorithms.models.tokenizer import Tokenizer

SEED_STRIDE = 1_000_003  # distance between the request seeds of two run seeds
Prompt = str | Sequence[int]
_NOT_OF_AN_ENGINE = ("device", "dtype", "weight_dtype", "tensor_parallel", "kv_scales")
"""Fields of `RuntimeSettings` that the target decides, or that the command line reads from files."""


def load_target(
    path: str | Path, device: str = "auto", dtype: str | torch.dtype = "auto", weight_dtype: str = "auto"
) -> Target:
    """Load a language model for inference, from a Hugging Face folder or a hub name `organisation/name`.

    `device` auto takes a GPU if there is one. `dtype` auto is bfloat16 on a GPU and float32 on the CPU. `weight_dtype`
    as `runtime.weight_dtype`. Raises ValueError: the folder cannot be used, or `device` is a GPU and there is none.
    """
    from algorithms.models.loading import load_target as load

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: expected cpu or auto, as torch finds no GPU here, got {device!r}")
    if dtype == "auto":
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype: expected auto, float32, bfloat16 or float16, got {dtype!r}")
    expect_choice("weight_dtype", weight_dtype, WEIGHT_DTYPES)
    return load(path, device, found, weight_dtype)


def load_algorithm(name: str | Any, target: Target, draft: str | Path | None = None, **settings: Any) -> Algorithm:
    """An algorithm by name (as in `algo=NAME`, or an instance of its `Config`), with its drafter loaded.

    `draft` is the folder or hub name of the drafter, `settings` are as in `algo.SETTING=VALUE`. Raises ValueError for
    an unknown name or setting, or a drafter that is missing or does not fit.
    """
    kinds = available()
    config = configured(kinds, "algorithm", name, settings)
    algorithm = kinds[config.name](config, target, None if draft is None else str(draft))
    if algorithm.needs_draft_model:
        algorithm.loaded_for = target
    return algorithm


def load_backend(name: str | Any = "fa4", impl: str = "auto", deterministic: bool = False, **settings: Any) -> Backend:
    """An attention backend by name (as in `backend=NAME`, or an instance of its `Config`), with its settings.

    `impl` is `auto`, `triton` or `reference`; `auto` takes the kernels on a GPU and plain torch elsewhere. Raises
    ValueError for an unknown name or setting, or where the backend's package is missing.
    """
    from algorithms.attention.backends import backends

    kinds = backends()
    config = configured(kinds, "backend", name, settings)
    return kinds[config.name](config, impl, deterministic)


def generate(
    target: Target,
    prompts: Prompt | Iterable[Prompt],
    algorithm: str | Algorithm = "autoregressive",
    backend: str | Backend = "fa4",
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    chat: bool = False,
    tokenizer: Tokenizer | None = None,
    **runtime: Any,
) -> Generation:
    """Decode `prompts` in batches.

    Args:
        target: from `load_target`.
        prompts: one prompt or several, each as text or as token ids.
        algorithm: from `load_algorithm`, or the name of one that needs no drafter.
        backend: from `load_backend`, or a name.
        sampling: for all prompts (prompt i then has the seed that `run.py` gives to prompt i), or one per prompt. None
            is greedy decoding of at most 128 tokens.
        chat: render text as a user turn with the model's chat template.
        tokenizer: None loads the one in the target's folder.
        runtime: fields of `RuntimeSettings` as in `runtime.SETTING=VALUE`, such as `max_batch`, `graph`, `adaptive`.

    Returns:
        `completions`, one per prompt: `text`, `token_ids`, `accepted_counts` (accepted drafts of each step),
        `drafted_counts`, `finish_reason`, `ttft_ms`, `total_ms`, `emitted_at_ms` of each step. And the times of the
        whole: `wall_ms`, `prefill_ms`, `decode_ms`, `phase_times_ms`.

    Raises:
        ValueError: a prompt or a setting that cannot be served.
    """
    from algorithms.engine.engine import Engine
    from algorithms.engine.grammar import Grammars
    from algorithms.engine.settings import RuntimeSettings
    from algorithms.models.tokenizer import Tokenizer

    tokenizer = tokenizer or Tokenizer.load(target.path)
    requests = _requests_of(prompts, sampling, chat, tokenizer)
    known = [field.name for field in fields(RuntimeSettings) if field.name not in _NOT_OF_AN_ENGINE]
    if unknown := [name for name in runtime if name not in known]:
        raise ValueError(f"runtime: {unknown[0]!r} is no setting here; expected one of {', '.join(known)}")
    longest = max((request.max_length for request in requests), default=None)
    settings = RuntimeSettings(**{"max_length": longest, **runtime})
    if isinstance(algorithm, str):
        algorithm = load_algorithm(algorithm, target)
    if algorithm.loaded_for not in (None, target):
        raise ValueError(f"algorithm: {algorithm.name} was loaded for another target; load it for this one")
    if isinstance(backend, str):
        backend = load_backend(backend, settings.impl, settings.deterministic)
    grammars = None
    if any(request.sampling.constrained for request in requests):
        grammars = Grammars.of_tokenizer(tokenizer, target.config.vocab_size)
    return Engine(target, algorithm, backend, settings, tokenizer.decode, grammars=grammars).generate(requests)


def make_request(index: int, prompt_ids: Sequence[int], sampling: SamplingParams, tokenizer: Tokenizer) -> Request:
    """Request `index`; bad words given as strings are encoded, as they are and after a space."""
    words: dict[tuple[int, ...], None] = {}
    for word in sampling.bad_words:
        forms = (word, " " + word.lstrip()) if isinstance(word, str) else ()
        encoded = [tuple(tokenizer.encode(form, add_special=False)) for form in forms]
        words |= dict.fromkeys(encoded or [word])
    return Request(index, tuple(prompt_ids), replace(sampling, bad_words=tuple(words)), tokenizer.eos_ids)


def request_seed(seed: int, index: int) -> int:
    """The seed of request `index` of a run with `seed`, whichever batch it is in."""
    return seed * SEED_STRIDE + index


def _requests_of(
    prompts: Prompt | Iterable[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None,
    chat: bool,
    tokenizer: Tokenizer,
) -> list[Request]:
    listed: list[Any] = [prompts] if isinstance(prompts, str) else list(prompts)
    if listed and isinstance(listed[0], SupportsIndex):
        listed = [listed]
    if isinstance(sampling, Sequence):
        each = list(sampling)
    else:
        shared = sampling or SamplingParams()
        each = [replace(shared, seed=request_seed(shared.seed, index)) for index in range(len(listed))]
    if len(each) != len(listed):
        raise ValueError(f"sampling: expected one per prompt, {len(listed)}, got {len(each)}")
    return [
        make_request(index, _encoded(prompt, tokenizer, chat), params, tokenizer)
        for index, (prompt, params) in enumerate(zip(listed, each, strict=True))
    ]


def _encoded(prompt: Prompt, tokenizer: Tokenizer, chat: bool) -> Sequence[int]:
    if not isinstance(prompt, str):
        if chat:
            raise ValueError("chat: expected prompts as text, got token ids")
        return [int(token) for token in prompt]
    return tokenizer.encode_chat([prompt]) if chat else tokenizer.encode(prompt)
