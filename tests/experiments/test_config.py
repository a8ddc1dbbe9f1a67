"""Composition of the configuration: every file composes and builds, keys have schemas, ranges are checked."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import zip_longest
from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig, OmegaConf

from experiments.app.compose import build_config, option_schemas, register
from experiments.app.errors import UserError, nearest, unknown_key_message, unknown_option_message
from experiments.app.identity import job_id
from experiments.app.manual import manual
from experiments.app.schema import CONFIG_FOLDER, REPO_ROOT
from experiments.app.task_schema import ignored_overrides, prompt_set

NEEDED = {
    "model=local": ["model.path=somewhere"],
    "data=jsonl": ["data.path=prompts.jsonl"],
    "data=prompt": ["data.text=hello"],
}
GROUPS = ("algo", "backend", "model", "data", "sampling", "runtime", "tracker", "task")
RECIPES = ("experiment", "debug")


def options(group: str) -> list[str]:
    found = {path.stem for path in (CONFIG_FOLDER / group).glob("*.yaml")} | set(option_schemas().get(group, {}))
    return [f"{group}={name}" for name in sorted(found)]


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


@cache
def default() -> DictConfig:
    return compose()


@pytest.mark.parametrize("chosen", selections(), ids=" ".join)
def test_every_option_composes_with_nothing_missing_and_builds(chosen: tuple[str, ...]) -> None:
    cfg = compose(*chosen, *(needed for option in chosen for needed in NEEDED.get(option, [])))
    assert not OmegaConf.missing_keys(cfg)
    built = build_config(cfg)
    for group, _, name in (option.partition("=") for option in chosen):
        if group in ("algo", "backend", "model", "data", "tracker", "task"):
            assert getattr(built, group).name == name


def test_the_default_run_is_the_headline() -> None:
    built = build_config(compose())
    names = (built.algo.name, built.backend.name, built.model.name, built.data.name, built.tracker.name)
    assert names == ("dflash", "fa4", "tiny", "arithmetic", "wandb")
    assert built.data.limit == 2, "all 200 would take hours in the interpreter"
    assert built.tracker.mode == "offline" and built.baseline and built.sampling.temperature == 0
    folders = (Path(built.model.path), Path(built.model.drafter_of("dflash")))
    assert folders == (REPO_ROOT / "assets/tiny/target", REPO_ROOT / "assets/tiny/dflash"), "from any folder"


def test_a_recipe_is_a_delta_and_the_command_line_wins() -> None:
    built = build_config(compose("experiment=qwen3_8b_dflash", "runtime.max_batch=3"))
    assert (built.model.path, built.runtime.max_batch) == ("Qwen/Qwen3-8B", 3)
    assert built.model.draft_path == "z-lab/Qwen3-8B-DFlash-b16"


WRONG_VALUES = (
    "runtime.device=gpu runtime.page_size=0 runtime.dtype=float64 runtime.impl=cuda runtime.graph=all "
    "runtime.max_batch=0 runtime.num_pages=0 runtime.max_length=1 algo.block_size=0 samples=-1 data.limit=0 "
    "sampling.temperature=-0.1 sampling.temperature=nan sampling.temperature=inf sampling.seed=-1 "
    "sampling.top_k=99999999999 tracker.mode=sometimes"
)


@pytest.mark.parametrize("override", WRONG_VALUES.split())
def test_ranges_are_checked_and_the_key_is_named(override: str) -> None:
    """One composition serves all."""
    with pytest.raises(UserError, match=override.split("=")[0].replace(".", r"\.")):
        build_config(OmegaConf.merge(default(), OmegaConf.from_dotlist([override])))


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "dflash_fa4_tiny"),
        (["task=compare", "algo=eagle"], "compare_fa4_tiny"),
        (["task=replay", "algo=ngram"], "replay_fa4_tiny"),
        (["task=kv_scales"], "kv_scales_fa4_tiny"),
        (["task=losslessness", "backend=torch"], "losslessness_tiny"),
        (["task=throughput", "algo=ngram"], "throughput_ngram_fa4_tiny"),
        (["task=graph_ablation"], "graph_ablation_dflash_fa4_tiny"),
        (["task=compare", "name=mine"], "mine"),
    ],
)
def test_a_run_is_named_by_what_it_measures(overrides: list[str], name: str) -> None:
    assert build_config(compose(*overrides)).name == name


def test_overrides_that_a_task_does_not_use_are_found() -> None:
    given = ["task=compare", "algo=eagle", "algo.steps=3", "+data.x=1", "task.data=[code]", "samples=3", "name=algo"]
    assert ignored_overrides(build_config(compose("task=compare")).task, given) == [
        "algo=eagle", "algo.steps=3", "+data.x=1", "samples=3",
    ]  # fmt: skip
    assert ignored_overrides(build_config(compose()).task, given) == []
    given = ["runtime.max_batch=4", "runtime.dtype=float32", "data=code"]
    assert ignored_overrides(build_config(compose("task=losslessness")).task, given) == given[:1]


@pytest.mark.parametrize(
    ("task", "typed", "instead"),
    [
        ("compare", "data.limit=4", "task.limit=4"),
        ("adaptive", "data=code", "task.data=[code]"),
        ("losslessness", "sampling.temperature=1", "task.temperature=1"),
    ],
)
def test_a_key_that_the_task_has_as_its_own_is_refused(task: str, typed: str, instead: str) -> None:
    with pytest.raises(UserError) as caught:
        ignored_overrides(build_config(compose(f"task={task}")).task, [typed])
    assert str(caught.value) == f"task={task} does not use {typed}\nuse {instead}"


def test_the_identity_of_a_job_has_what_changes_its_figures() -> None:
    base = job_id(compose())
    same = ["samples=0", "tracker=none", "model.obtain=other", "model.drafts.eagle3=x", "sweep.share_target=true"]
    assert {job_id(compose(text)) for text in same} == {base}
    other = ["sweep.share_baseline=false", "model.drafts.dflash=x", "data.limit=1"]
    assert base not in {job_id(compose(text)) for text in other}
    assert job_id(compose("task=compare")) != job_id(compose("task=compare", "model.drafts.eagle3=x"))


def test_every_key_and_option_is_in_the_help() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hydra, "initialize_config_dir", lambda **_: nullcontext())
        shown = manual(["algo=eagle3", "task=compare"])
    assert "*eagle3" in shown and "sampling.temperature=0.0" in shown and "model.drafts.dflash=" in shown
    for key in ("task.only", "algo.topk", "samples", "sweep.force", "paths.outputs", "tracker.mode"):
        (line,) = [line for line in shown.splitlines() if line.startswith(f"  {key}=")]
        assert re.search(r"=\S+\s+\w+ \w+", line), f"{key} has no description"


def test_a_name_cannot_leave_the_outputs_folder() -> None:
    for name in ("../up", "a/b", "", ".hidden"):
        with pytest.raises(UserError, match="plain name"):
            build_config(compose(f"name='{name}'"))


def test_suggestions_prefer_the_same_last_part_and_invent_nothing() -> None:
    keys = ["data.limit", "sampling.seed", "runtime.page_size"]
    assert nearest("seed", keys)[0] == "sampling.seed"
    assert "did you mean" not in unknown_key_message("zzz", keys, {})
    many = [f"group.key_number_{i}" for i in range(500)]
    for message in (unknown_key_message("group.key", many, {}), unknown_option_message("algo", "x", many)):
        assert len(message) < 2000 and "500 in all" in message


def test_a_task_takes_prompt_sets_by_name_and_files_by_path() -> None:
    assert (prompt_set("chat", 3, False).name, prompt_set("chat", 3, False).limit) == ("chat", 3)
    for path in ("folder/questions.jsonl", "questions.json.gz", "folder/questions"):
        found = prompt_set(path, None, True)
        assert (found.path, found.name, found.skip_long) == (path, Path(path).name, True)
    with pytest.raises(ValueError, match="task.data: expected one of .*chat"):
        prompt_set("chta", None, False)
