"""Composition of the configuration: every file composes and builds, keys have schemas, ranges are checked."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.app.compose import build_config, register
from experiments.app.errors import UserError
from experiments.app.schema import CONFIG_FOLDER, REPO_ROOT
from experiments.app.suggest import nearest, unknown_key_message, unknown_option_message
from experiments.app.task_schema import ignored_overrides, prompt_set

NEEDED = {
    "model=local": ["model.path=somewhere"],
    "data=jsonl": ["data.path=prompts.jsonl"],
    "data=prompt": ["data.text=hello"],
}
GROUPS = ("algo", "backend", "model", "data", "sampling", "runtime", "tracker", "task")
RECIPES = ("experiment", "debug")


def options(group: str) -> list[str]:
    return [f"{group}={path.stem}" for path in sorted((CONFIG_FOLDER / group).glob("*.yaml"))]


def selections() -> list[tuple[str, ...]]:
    """Every option of every group, those of different groups side by side, and every recipe alone."""
    together = [tuple(filter(None, chosen)) for chosen in zip_longest(*map(options, GROUPS))]
    return together + [(option,) for group in RECIPES for option in options(group)]


@pytest.fixture(scope="module", autouse=True)
def schemas() -> Iterator[None]:
    register()
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        yield


def compose(*overrides: str) -> DictConfig:
    return hydra.compose("config", overrides=list(overrides))


@pytest.mark.parametrize("chosen", selections(), ids=" ".join)
def test_every_option_composes_with_nothing_missing_and_builds(chosen: tuple[str, ...]) -> None:
    cfg = compose(*chosen, *(needed for option in chosen for needed in NEEDED.get(option, [])))
    assert not OmegaConf.missing_keys(cfg)
    built = build_config(cfg)
    for group, _, name in (option.partition("=") for option in chosen):
        if group in ("algo", "backend", "model", "data", "tracker", "task"):
            assert getattr(built, group).name == name


@pytest.mark.parametrize("option", sorted(NEEDED))
def test_what_an_option_needs_is_named(option: str) -> None:
    key = NEEDED[option][0].split("=")[0]
    with pytest.raises(UserError, match=f"{key} has no value"):
        build_config(compose(option))


def test_the_default_run_is_the_headline() -> None:
    built = build_config(compose())
    names = (built.algo.name, built.backend.name, built.model.name, built.data.name, built.tracker.name)
    assert names == ("dflash", "fa4", "tiny", "arithmetic", "wandb")
    assert built.tracker.mode == "offline" and built.baseline and built.sampling.temperature == 0


def test_shipped_models_are_found_from_any_folder() -> None:
    model = build_config(compose()).model
    assert Path(model.path) == REPO_ROOT / "assets/tiny/target"
    assert Path(model.drafter_of("dflash")) == REPO_ROOT / "assets/tiny/dflash"


def test_a_recipe_is_a_delta_and_the_command_line_wins() -> None:
    built = build_config(compose("experiment=qwen3_8b_dflash", "runtime.max_batch=3"))
    assert (built.model.path, built.runtime.max_batch) == ("Qwen/Qwen3-8B", 3)
    assert built.model.draft_path == "z-lab/Qwen3-8B-DFlash-b16"


@pytest.mark.parametrize(
    "override",
    [
        "sampling.max_new_tokens=0",
        "sampling.temperature=-0.1",
        "sampling.temperature=nan",
        "sampling.temperature=inf",
        "sampling.seed=-1",
        "sampling.top_k=99999999999",
        "sampling.stop_strings=['']",
        "runtime.device=gpu",
        "runtime.dtype=float64",
        "runtime.impl=cuda",
        "runtime.graph=all",
        "runtime.page_size=0",
        "runtime.max_batch=0",
        "runtime.num_pages=0",
        "runtime.max_length=1",
        "tracker.mode=sometimes",
        "data.limit=0",
        "algo.block_size=0",
        "samples=-1",
    ],
)
def test_ranges_are_checked_and_the_key_is_named(override: str) -> None:
    with pytest.raises(UserError, match=override.split("=")[0].replace(".", r"\.")):
        build_config(compose(override))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "dflash_fa4_tiny"),
        (["task=compare", "algo=eagle"], "compare_fa4_tiny"),
        (["task=losslessness", "backend=torch"], "losslessness_tiny"),
        (["task=throughput", "algo=ngram"], "throughput_ngram_fa4_tiny"),
        (["task=graph_ablation"], "graph_ablation_dflash_fa4_tiny"),
        (["task=compare", "name=mine"], "mine"),
    ],
)
def test_a_run_is_named_by_what_it_measures(overrides: list[str], name: str) -> None:
    assert build_config(compose(*overrides)).name == name


@pytest.mark.parametrize("task", ["throughput", "losslessness"])
def test_tasks_that_size_their_own_pools_take_no_number_of_pages(task: str) -> None:
    with pytest.raises(UserError, match=rf"runtime\.num_pages cannot be given to task={task}: each .* as it needs"):
        build_config(compose(f"task={task}", "runtime.num_pages=64"))
    assert build_config(compose("task=compare", "runtime.num_pages=64")).runtime.num_pages == 64


def test_overrides_that_a_task_does_not_use_are_found() -> None:
    given = ["task=compare", "algo=eagle", "algo.steps=3", "+data.x=1", "task.data=[code]", "samples=3", "name=algo"]
    assert ignored_overrides(build_config(compose("task=compare")).task, given) == [
        "algo=eagle", "algo.steps=3", "+data.x=1", "samples=3",
    ]  # fmt: skip
    assert ignored_overrides(build_config(compose()).task, given) == []
    given = ["runtime.max_batch=4", "runtime.dtype=float32", "sampling.temperature=1", "data=code"]
    assert ignored_overrides(build_config(compose("task=losslessness")).task, given) == [given[0], given[2]]


def test_a_name_cannot_leave_the_outputs_folder() -> None:
    for name in ("../up", "a/b", "", ".hidden"):
        with pytest.raises(UserError, match="plain name"):
            build_config(compose(f"name='{name}'"))


def test_bfloat16_in_the_interpreter_is_refused() -> None:
    pair = ("runtime.device=cpu", "runtime.dtype=bfloat16")
    with pytest.raises(UserError, match="impl=reference"):
        build_config(compose(*pair))
    assert build_config(compose(*pair, "runtime.impl=reference")).runtime.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("override", "key", "suggestion"),
    [
        ("+typo=1", "typo", None),
        ("+nested.typo=1", "nested", None),
        ("+data.limt=3", "data.limt", "data.limit"),
        ("+runtime.pagesize=3", "runtime.pagesize", "runtime.page_size"),
        ("+limit=3", "limit", "data.limit"),
        ("+concurrency=[1]", "concurrency", r"task.concurrency=… \(with task=throughput\)"),
    ],
)
def test_keys_added_past_the_schema_are_refused(override: str, key: str, suggestion: str | None) -> None:
    with pytest.raises(UserError, match=f"unknown key '{key}'") as caught:
        build_config(compose(override))
    if suggestion:
        assert caught.match(f"did you mean: .*{suggestion}")


def test_suggestions_prefer_the_same_last_part_and_invent_nothing() -> None:
    keys = ["data.limit", "sampling.seed", "runtime.page_size"]
    assert nearest("seed", keys)[0] == "sampling.seed"
    assert nearest("zzz", keys) == []
    message = unknown_key_message("zzz", keys, {})
    assert "did you mean" not in message


def test_messages_fit_one_screen() -> None:
    many = [f"group.key_number_{i}" for i in range(500)]
    for message in (unknown_key_message("group.key", many, {}), unknown_option_message("algo", "x", many)):
        assert len(message) < 2000 and "500 in all" in message


def test_the_resolved_configuration_is_plain(tmp_path: Any) -> None:
    text = OmegaConf.to_yaml(compose("name=mine"), resolve=True)
    assert "${" not in text and "name: mine" in text


def test_a_task_takes_prompt_sets_by_name_and_files_by_path() -> None:
    assert (prompt_set("chat", 3, False).name, prompt_set("chat", 3, False).limit) == ("chat", 3)
    for path in ("folder/questions.jsonl", "questions.json.gz", "folder/questions"):
        found = prompt_set(path, None, True)
        assert (found.path, found.name, found.skip_long) == (path, Path(path).name, True)
    with pytest.raises(ValueError, match="task.data: expected one of .*chat"):
        prompt_set("chta", None, False)
