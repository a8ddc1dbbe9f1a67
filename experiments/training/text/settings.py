"""Settings of the training text. The options of the group `text` are files over these dataclasses."""

from dataclasses import dataclass, field
from typing import Annotated

from algorithms.checked import Between, Checked
from algorithms.engine.settings import LARGEST_INT32

PLACE = "{prompt}"


@dataclass
class KindSettings(Checked):
    """One kind of text: the source of its prompts, their markup, and the target's answers.

    `source` is one of

    * `target`: the target writes user turns itself, sampled at `prompt_temperature` after the chat template's user
      prefix and one of the `openings` (as in Magpie, arXiv 2406.08464). No data set is needed;
    * `file`: the prompts of `path`, a .jsonl file as for `data=jsonl` or a .txt file with empty lines between prompts;
    * `arithmetic`: word problems of `experiments/data/arithmetic.py`;
    * `functions`, `windows`: beginnings of functions, and random windows, of the standard library's source.

    A prompt replaces `{prompt}` in `template` and becomes a user turn, unless `raw` continues it without markup.
    With `turns` above 1 the target writes further user turns after its answers. `count` is the largest number of
    prompts, `prompt_tokens` and `answer_tokens` bound the length of a turn and of its answer. Answers are greedy, and
    a `sampled_share` of them is sampled at temperature 1.
    """

    GROUP = "text.kinds.*."
    source: Annotated[str, ("target", "file", "arithmetic", "functions", "windows")] = "target"
    count: Annotated[int, Between(1)] = 1024
    path: str | None = None
    openings: list[str] = field(default_factory=lambda: [""])
    turns: Annotated[int, Between(1)] = 1
    prompt_temperature: Annotated[float, Between(0, above=True)] = 1.0
    template: str = PLACE
    raw: bool = False
    prompt_tokens: Annotated[int, Between(1)] = 192
    answer_tokens: Annotated[int, Between(1)] = 256
    sampled_share: Annotated[float, Between(0, 1)] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.path is not None) != (self.source == "file"):
            raise ValueError(f"text.kinds.*.path belongs to source=file, got source={self.source}, path={self.path}")
        if not self.openings:
            raise ValueError("text.kinds.*.openings: expected at least one, [''] for none, got []")
        if self.template.count(PLACE) != 1:
            raise ValueError(f"text.kinds.*.template: expected {PLACE} once, got {self.template!r}")
        if self.raw and (self.source == "target" or self.template != PLACE):
            raise ValueError("text.kinds.*.raw skips the chat template: expected a source of raw text, and no template")
        if self.turns > 1 and self.source != "target":
            raise ValueError(f"text.kinds.*.turns above 1 belongs to source=target, got source={self.source}")


@dataclass
class TextSettings(Checked):
    """All kinds of text, and how they are written. Answers go to files of `shard` prompts in `folder`. Existing files
    are used again; all programs that run at the same time write the missing ones. `batch` is the number of requests in
    the engine. After `minutes` no further file is begun. `validation` prompts of each kind are held out."""

    GROUP = "text."
    kinds: dict[str, KindSettings] = field(default_factory=dict)
    folder: str = "outputs/text"
    seed: Annotated[int, Between(0, LARGEST_INT32)] = 0
    validation: Annotated[int, Between(1)] = 48
    shard: Annotated[int, Between(1)] = 1024
    batch: Annotated[int, Between(1)] = 256
    minutes: Annotated[float | None, Between(0, above=True)] = None
