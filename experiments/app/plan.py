"""From a checked configuration to engines and requests; what a user can get wrong shows here, before a run."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from experiments.app.distributed import join, load_shared
from experiments.app.errors import UserError, user_errors
from experiments.app.schema import GenerateConfig, RuntimeConfig
from experiments.data.prompts import PromptSet, datasets, load_prompts
from experiments.report import metrics as figures

if TYPE_CHECKING:
    from algorithms.runtime.algorithm import Algorithm
    from algorithms.runtime.backends import Backend
    from algorithms.runtime.engine import Engine
    from algorithms.runtime.models.loading import Target
    from algorithms.runtime.models.tokenizer import Tokenizer
    from algorithms.runtime.request import Completion, Request

INTERPRET = "TRITON_INTERPRET"
SEED_STRIDE = 1_000_003
"""Keeps the streams of two run seeds apart for every request of one run."""


@dataclass(frozen=True)
class Hardware:
    """`impl` is what the engine is asked for, `label` what the records call it."""

    device: str
    dtype: str
    impl: str
    label: str


@dataclass(frozen=True)
class Setup:
    """What both sides of a comparison share."""

    hardware: Hardware
    tokenizer: Tokenizer
    target: Target
    prompts: PromptSet
    requests: list[Request]
    max_length: int

    def with_prompts(self, config: GenerateConfig, prompts: PromptSet) -> Setup:
        """The same target on other prompts."""
        with user_errors(ValueError):
            requests = make_requests(config, prompts, self.tokenizer)
        return replace(
            self, prompts=prompts, requests=requests, max_length=config.runtime.max_length or longest(requests)
        )

    def accuracy(self, completions: Sequence[Completion]) -> float | None:
        """Share of right answers; None where the prompts have none. `completions` may repeat the prompts in turn."""
        prompts, score = self.prompts.prompts, self.prompts.score

        def judge(index: int, text: str) -> bool:
            assert score is not None
            return score(prompts[index % len(prompts)], text)

        return figures.accuracy(completions, judge if score else None)


def longest(requests: Sequence[Request]) -> int:
    """Tokens of the longest request, prompt and answer."""
    return max(request.max_length for request in requests)


def resolve_hardware(runtime: RuntimeConfig) -> Hardware:
    """Settle `auto`; without a GPU, switch Triton's interpreter on, which must precede Triton's import."""
    import torch

    has_gpu = torch.cuda.is_available()
    if runtime.device == "cuda" and not has_gpu:
        raise UserError(
            "runtime.device=cuda: no CUDA device is visible\n"
            f"torch {torch.__version__} sees {torch.cuda.device_count()} devices\n"
            "use runtime.device=cpu (kernels run in Triton's interpreter), or install a CUDA build of torch"
        )
    device = "cuda" if has_gpu and runtime.device != "cpu" else "cpu"
    dtype = runtime.dtype if runtime.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    if runtime.impl == "reference":
        return Hardware(device, dtype, "reference", "reference")
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton is not installed\npip install triton, or use runtime.impl=reference")
    if device == "cpu":
        if dtype == "bfloat16":
            raise UserError(
                "runtime.dtype=bfloat16 without a GPU: Triton's interpreter computes bfloat16 wrongly\n"
                "use runtime.dtype=float32, or runtime.impl=reference"
            )
        os.environ[INTERPRET] = "1"
    return Hardware(device, dtype, "triton", "triton-interpreter" if os.environ.get(INTERPRET) == "1" else "triton")


def prepare(config: GenerateConfig) -> Setup:
    """Prompts, tokenizer, target and requests. Raises `UserError` for whatever does not fit."""
    with user_errors(ValueError, OSError):
        prompts = load_prompts(config.data)
    hardware = resolve_hardware(config.runtime)
    check_combination(config, hardware)
    join(config.runtime.tensor_parallel, hardware.device)
    from algorithms.runtime.models.tokenizer import Tokenizer

    with user_errors(ValueError, OSError):
        tokenizer = Tokenizer.load(config.model.path)
        requests = make_requests(config, prompts, tokenizer)
        target = load_shared(config.model.path, hardware, config.runtime.tensor_parallel)
    max_length = config.runtime.max_length or longest(requests)
    return Setup(hardware, tokenizer, target, prompts, requests, max_length)


def load_prompt_set(name: str, limit: int | None) -> PromptSet:
    """A prompt set by its name alone, such as `data=NAME data.limit=LIMIT` would load it."""
    settings = datasets().get(name)
    if settings is None:
        raise ValueError(f"task.data: expected among {', '.join(datasets())}, got {name!r}")
    return load_prompts(settings() if limit is None else settings(limit=limit))


def check_combination(config: GenerateConfig, hardware: Hardware) -> None:
    """Refuse what cannot work together, before any weight is read."""
    level = graph_level(config, hardware)
    _check_graph(config, hardware, level, f"runtime.graph={level}", "use runtime.graph=none")
    with user_errors(ValueError, OSError):
        _check_attention(config, hardware)


def _check_graph(config: GenerateConfig, hardware: Hardware, level: str, setting: str, instead: str) -> None:
    """Refuse a level of capture that the device or the backend cannot have; `setting` asked for it."""
    from algorithms.runtime.backends import check_backend

    if level != "none" and hardware.device != "cuda":
        raise UserError(f"{setting} captures CUDA graphs, and this run is on the CPU\n{instead}")
    with user_errors(ValueError):
        check_backend(config.backend, hardware.impl, level, instead)


def _check_attention(config: GenerateConfig, hardware: Hardware) -> None:
    """Ask the backend whether it can serve the target at all; the drafts' own shape is asked once they are known."""
    import torch

    from algorithms.runtime.backends import backends, check_calls
    from algorithms.runtime.models.loading import read_target

    shape = read_target(config.model.path).config
    backend = backends()[config.backend.name](config.backend, hardware.impl)
    modes, device = {"prefill": "chain", "decode": "chain"}, torch.device(hardware.device)
    check_calls(backend, shape, modes, config.runtime.page_size, getattr(torch, hardware.dtype), device)


def graph_level(config: GenerateConfig, hardware: Hardware) -> str:
    """How much of a step is captured; `auto` is all of it wherever that can be."""
    if config.runtime.graph != "auto":
        return config.runtime.graph
    return "step" if hardware.device == "cuda" and config.backend.capturable else "none"


def check_drafters(config: GenerateConfig, algos: Collection[Any]) -> None:
    """Refuse what an algorithm cannot have: a drafter that is not named or serves several, a level of capture."""
    from algorithms.registry import available

    drafting = [name for name in dict.fromkeys(algo.name for algo in algos) if available()[name].needs_draft_model]
    if config.model.draft_path is not None and len(drafting) > 1:
        raise UserError(
            f"model.draft_path is the drafter of one algorithm, and this task runs {', '.join(drafting)}\n"
            f"give model.drafts.{drafting[0]} and so on instead, or one of them as task.only"
        )
    for name in drafting:
        if config.model.drafter_of(name) is None:
            raise UserError(
                f"algo={name} needs a drafter, and model={config.model.name} names none for it\n"
                f"give its folder or hub name as model.draft_path or model.drafts.{name}"
            )
    from algorithms.runtime.models.loading import read_target

    hardware = resolve_hardware(config.runtime)
    with user_errors(ValueError, OSError):
        target = read_target(config.model.path)
    for algo in algos:
        with user_errors(ValueError, OSError):
            available()[algo.name].check(algo, target, config.model.drafter_of(algo.name))
        if own := available()[algo.name].graph_of(algo):
            instead = f"leave {own.setting} out of algo={algo.name}"
            _check_graph(config, hardware, own.level, own.setting, instead)


def make_requests(config: GenerateConfig, prompts: PromptSet, tokenizer: Tokenizer) -> list[Request]:
    """One request a prompt. Its seed depends on the run's seed and its number alone, not on batching."""
    from algorithms.runtime.request import Request

    sampling = config.sampling
    return [
        Request(
            id=index,
            prompt_ids=tuple(prompt.encode(tokenizer)),
            sampling=replace(
                sampling,
                seed=sampling.seed * SEED_STRIDE + index,
                stop_strings=(*prompt.stop_strings, *sampling.stop_strings),
            ),
            eos_token_ids=tokenizer.eos_ids,
        )
        for index, prompt in enumerate(prompts.prompts)
    ]


def make_engine(config: GenerateConfig, setup: Setup, algo: Any) -> tuple[Engine, Algorithm, Backend]:
    """An engine for the algorithm that `algo` configures, that algorithm, and its attention backend."""
    from algorithms.registry import available
    from algorithms.runtime.backends import backends
    from algorithms.runtime.engine import Engine, EngineSettings

    runtime, impl = config.runtime, setup.hardware.impl
    settings = EngineSettings(
        page_size=runtime.page_size,
        max_batch=runtime.max_batch,
        num_pages=runtime.num_pages,
        max_length=setup.max_length,
        impl=impl,
        graph=graph_level(config, setup.hardware),
        overlap=runtime.overlap,
    )
    try:
        with user_errors(ValueError, OSError):
            backend = backends()[config.backend.name](config.backend, impl)
            algorithm = available()[algo.name](algo, setup.target, config.model.drafter_of(algo.name))
            return Engine(setup.target, algorithm, backend, settings, setup.tokenizer.decode), algorithm, backend
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        told = (str(error) or "out of memory").splitlines()[0]
        raise UserError(f"{told}\nlower runtime.num_pages, runtime.max_batch or sampling.max_new_tokens") from error


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; on the CPU the error has no type of its own."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return any(text in str(error) for text in ("DefaultCPUAllocator", "Storage size calculation overflowed"))
