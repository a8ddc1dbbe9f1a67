"""The same target and prompts in transformers' own `generate`: greedy, and assisted generation.

    python -m experiments.peer_generate model=models/smollm2-135m-instruct data=edit,humaneval limit=8 out=rows.jsonl
    python -m experiments.peer_generate model=FOLDER assistant=DRAFT_FOLDER

Assisted generation is transformers' speculative decoding. `prompt_lookup` drafts what followed the last n-gram of the
text, and `assistant` is a smaller model with the same tokenizer. Requests are served one at a time, because assisted
generation serves one. A row says how many tokens a forward of the target wrote, tokens per second of the whole call,
and whether the texts are those of greedy decoding.

Settings: `model`, `assistant`, `data` (names of prompt sets, of which first turns are asked), `limit` prompts of each,
`max_new_tokens`, `lookup` (tokens that prompt lookup drafts), `device` and `dtype` (auto: bfloat16 on a GPU where there
is one, else float32 on the CPU), `out` (rows are appended).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.app.arguments import assign
from experiments.app.cli import report
from experiments.app.errors import UserError, user_errors
from experiments.app.suggest import unknown_option_message
from specdec_kernels.checks import expect_choice

DEVICES, DTYPES = ("auto", "cuda", "cpu"), ("auto", "bfloat16", "float16", "float32")
METHODS = ("greedy", "prompt_lookup", "assistant")
WARM_UP_TOKENS = 16


@dataclass
class Settings:
    """What the command line asks for."""

    model: str = "models/smollm2-135m-instruct"
    assistant: str = ""
    data: str = "edit,humaneval,chat"
    limit: int = 8
    max_new_tokens: int = 128
    lookup: int = 10
    device: str = "auto"
    dtype: str = "auto"
    out: str = "peer_generate.jsonl"


def parsed(arguments: Sequence[str]) -> Settings:
    """The settings of a command line of key=value. Raises UserError for any other key or value."""
    settings = Settings()
    if others := assign(settings, arguments, __doc__ or ""):
        raise UserError(f"{others[0]!r} is no setting: expected key=value, such as limit=8")
    with user_errors(ValueError):
        expect_choice("device", settings.device, DEVICES)
        expect_choice("dtype", settings.dtype, DTYPES)
    return settings


def settle(settings: Settings) -> None:
    """Replace `auto` by what the machine has. Raises UserError for prompt sets and devices that are not there."""
    import torch

    from experiments.data.prompts import datasets

    for name in settings.data.split(","):
        if name not in datasets():
            raise UserError(unknown_option_message("data", name, sorted(datasets())))
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda: no CUDA device is visible\nuse device=cpu, or install a CUDA build of torch")
    if settings.device == "auto":
        settings.device = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.dtype == "auto":
        settings.dtype = "bfloat16" if settings.device == "cuda" else "float32"


@dataclass
class Written:
    """What one call of `generate` wrote."""

    tokens: list[int]
    forwards: int
    """Forwards of the target, the one over the prompt included."""
    seconds: float


class Peer:
    """A target of transformers, and an assistant if there is one."""

    def __init__(self, settings: Settings) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.settings, dtype = settings, getattr(torch, settings.dtype)

        def load(folder: str) -> Any:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            return model.to(settings.device).eval()

        self.model = load(settings.model)
        self.assistant = load(settings.assistant) if settings.assistant else None
        self._forwards = 0
        self.model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    def write(self, ids: Sequence[int], method: str, max_new_tokens: int) -> Written:
        """The answer to the prompt `ids`, greedily."""
        import torch

        extra: dict[str, Any] = {}
        if method == "prompt_lookup":
            extra["prompt_lookup_num_tokens"] = self.settings.lookup
        if method == "assistant":
            extra["assistant_model"] = self.assistant
        prompt = torch.tensor([list(ids)], device=self.settings.device)
        self._forwards = 0
        with torch.inference_mode(), self._clock() as seconds:
            found = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                **extra,
            )
        return Written(found[0, len(ids) :].tolist(), self._forwards, seconds[0])

    @contextmanager
    def _clock(self) -> Iterator[list[float]]:
        import torch

        measured: list[float] = []
        begin = time.perf_counter()
        yield measured
        if self.settings.device == "cuda":
            torch.cuda.synchronize()
        measured.append(time.perf_counter() - begin)


def rows_of(peer: Peer, name: str, prompts: Sequence[Sequence[int]]) -> Iterator[dict[str, Any]]:
    """One row per method on the prompt set `name`."""
    greedy: list[list[int]] = []
    most = peer.settings.max_new_tokens
    for method in METHODS:
        if method == "assistant" and peer.assistant is None:
            continue
        peer.write(prompts[0], method, min(most, WARM_UP_TOKENS))
        written = [peer.write(ids, method, most) for ids in prompts]
        texts = [each.tokens for each in written]
        greedy = greedy or texts
        num_tokens, seconds = sum(map(len, texts)), sum(each.seconds for each in written)
        yield {
            "engine": "transformers",
            "data": name,
            "method": method,
            "num_requests": len(written),
            "output_tokens": num_tokens,
            "tokens_per_step": num_tokens / sum(each.forwards for each in written),
            "wall_tokens_per_s": num_tokens / seconds,
            "step_ms": 1e3 * seconds / sum(each.forwards for each in written),
            "lossless": {
                "checked": 0 if method == "greedy" else len(texts),
                "identical": sum(a == b for a, b in zip(texts, greedy, strict=True)),
            },
        }


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """All rows, with their conditions. Raises DataError for a prompt set that cannot be used."""
    from algorithms.runtime.models.loading import read_target
    from algorithms.runtime.models.tokenizer import Tokenizer
    from experiments.app.provenance import git_revision, gpu_clocks, machine, versions
    from experiments.data.prompts import datasets, load_prompts

    folder, tokenizer, peer = read_target(settings.model), Tokenizer.load(settings.model), Peer(settings)
    conditions = {
        "model": folder.path.name + (f" ({folder.origin})" if folder.origin else ""),
        "machine": machine(settings.device),
        "device": settings.device,
        "dtype": settings.dtype,
        "max_new_tokens": settings.max_new_tokens,
        "max_batch": 1,
        "lookup": settings.lookup,
        "revision": git_revision(),
        "versions": versions(),
    }
    for name in settings.data.split(","):
        prompts = [prompt.encode(tokenizer) for prompt in load_prompts(datasets()[name](limit=settings.limit)).prompts]
        for row in rows_of(peer, name, prompts):
            yield {**row, **conditions, "clocks": gpu_clocks(settings.device)}


def main() -> None:
    """Command line entry."""
    try:
        settings = parsed(sys.argv[1:])
        settle(settings)
        with user_errors(ValueError), Path(settings.out).open("a", encoding="utf-8") as file:
            for row in measure(settings):
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    f"{row['data']:10} {row['method']:14} {row['tokens_per_step']:.2f} tokens/step  "
                    f"{row['wall_tokens_per_s']:,.1f} tokens/s  {row['step_ms']:.2f} ms/step",
                    flush=True,
                )
    except UserError as error:
        report(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
