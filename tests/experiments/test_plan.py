"""What cannot work together is refused from configurations alone, before any weight is read."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest

from experiments.app.compose import build_config, register
from experiments.app.errors import UserError
from experiments.app.plan import Plan, resolve
from experiments.app.schema import CONFIG_FOLDER
from tests.algorithms.tiny_folders import edit_json

CPU = ("runtime.device=cpu", "runtime.impl=reference")


@pytest.fixture(scope="module", autouse=True)
def schemas() -> Iterator[None]:
    register()
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):
        yield


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("algorithms.models.loading.weights._read", read)


def check(*overrides: str) -> Plan:
    return resolve(build_config(hydra.compose("config", overrides=[*CPU, *overrides])))


def refusal(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        check(*overrides)
    return str(caught.value)


TINY = CONFIG_FOLDER.parent / "assets" / "tiny"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algo=dflash", "model.draft_path=nowhere"], ["model folder not found", "nowhere", "model.draft_path"]),
        (["algo=dflash", "algo.block_size=200"], ["algo.block_size: expected at most", "as trained, got 200"]),
        (["algo=dflash", "algo.window=2"], ["algo.window: expected at least the block of", "got 2"]),
        (["algo=dflash", f"model.draft_path={TINY / 'eagle'}"], ["this is not a DFlash drafter"]),
        (["algo=eagle", f"model.draft_path={TINY / 'dflash'}"], ["this is not an EAGLE head", "no hidden_norm.weight"]),
        (["algo=eagle", f"model.draft_path={TINY / 'draft'}"], ["this is not an EAGLE head", "Qwen3ForCausalLM"]),
        (["algo=eagle3", f"model.draft_path={TINY / 'eagle'}"], ["this is not an EAGLE-3 head", "midlayer.*"]),
        (["algo=peagle", f"model.draft_path={TINY / 'eagle3'}"], ["this is not a P-EAGLE head", "mask_hidden"]),
        (["algo=mtp"], ["the target has no MTP head", "model.mtp_layers.", "mimo"]),
        (["algo=naive_eagle", f"model.draft_path={TINY / 'target'}"], ["this is not an EAGLE head"]),
        (["algo=standalone", f"model.draft_path={TINY / 'eagle'}"], ["this is not a language model", "embed_tokens"]),
        (["algo=standalone", f"model.draft_path={TINY / 'eagle3'}"], ["this is not a language model"]),
        (["algo=standalone", f"model.draft_path={TINY / 'dflash'}"], ["this is not a language model", "fc.weight"]),
        (["algo=ngram", "algo.corpus=nowhere.txt"], ["algo.corpus: expected a text file", "nowhere.txt"]),
        (["algo=ngram", f"algo.corpus={TINY}"], ["algo.corpus: expected a text file"]),
        (["algo=ngram", f"model.path={TINY / 'eagle'}"], ["this is not a language model"]),
        (["algo=eagle3", "algo.topk=4", "algo.num_nodes=8", "algo.draft_sampling=sample", "runtime.adaptive=true"],
         ["(draft_sampling sample)"]),
        (["algo=standalone", "algo.rule=block", "runtime.adaptive=true"], ["samples its drafts (rule block)"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_weights_load(overrides: list[str], expected: list[str]) -> None:
    said = refusal(*overrides)
    for text in expected:
        assert text in said, said


@pytest.mark.parametrize("algo", ["dflash", "eagle", "eagle3", "naive_eagle", "standalone", "ngram", "autoregressive"])
def test_shipped_drafters_pass(algo: str) -> None:
    """Also with draft lengths that are chosen each step, because they sample nothing."""
    check(f"algo={algo}", f"runtime.adaptive={str(algo != 'autoregressive').lower()}")


def test_a_target_that_has_to_be_fetched_says_how(tmp_path: Path) -> None:
    said = refusal("model=smollm2", "algo=ngram", f"model.path={tmp_path / 'absent'}")
    assert "make smollm2" in said and "HuggingFaceTB/SmolLM2-135M-Instruct" in said and "absent" in said


def test_methods_without_a_drafter_can_be_left_out() -> None:
    drafters = f"model.drafts={{eagle3:{TINY / 'eagle3'}}}"
    words = ("task=compare", "model=local", f"model.path={TINY / 'target'}", drafters)
    said = refusal(*words)
    assert "algo=standalone needs a drafter, and model=local names none for it" in said
    assert "give its folder or hub name as model.drafts.standalone\n" in said  # model.draft_path would be refused
    (instead,) = [word for word in said.split() if word.startswith("task.only=")]
    assert instead == "task.only=[eagle3_chain,eagle3_tree,ngram]"
    check(*words, instead)


def test_a_drafter_is_named_without_a_plus() -> None:
    named = f"model.drafts.eagle3={TINY / 'eagle3'}"
    check("model=local", f"model.path={TINY / 'target'}", "algo=eagle3", named)
    said = refusal("algo=eagle3", "model.drafts.eagle3=nowhere/else/head")
    assert "the drafter of model=tiny is not there: nowhere/else/head" in said and "model.drafts.eagle3" in said


@pytest.mark.parametrize(
    ("size", "backend", "expected"),
    [
        (24, "fa4", ["multiples of 16 up to 256, got 24", "use backend=torch"]),
        (264, "fa4", ["multiples of 16 up to 256, got 264"]),
        (100, "torch", ["no KV cache can hold its keys", "multiple of 8 from 16 to 512, got 100"]),
        (24, "torch", []),
    ],
)
def test_head_dimensions_are_checked_before_weights_load(
    tmp_path: Path, size: int, backend: str, expected: list[str]
) -> None:
    """Of the target and of every drafter with a cache."""
    for name, overrides in (
        ("target", ["algo=autoregressive", "model.path={}"]),
        ("eagle", ["algo=eagle", "algo.topk=2", "model.draft_path={}"]),
        ("dflash", ["algo=dflash", "model.draft_path={}"]),
        ("draft", ["algo=standalone", "model.draft_path={}"]),
    ):
        folder = shutil.copytree(TINY / name, tmp_path / name)
        edit_json(folder / "config.json", head_dim=size)
        asked = (f"backend={backend}", *(text.format(folder) for text in overrides))
        if expected:
            said = refusal(*asked)
            assert overrides[0] in said or name == "target", said
            assert all(text in said for text in expected), said
        else:
            check(*asked)


def test_topk_above_the_draft_vocabulary(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY / "eagle3", tmp_path / "head")
    edit_json(folder / "config.json", draft_vocab_size=5)
    said = refusal("algo=eagle3", f"model.draft_path={folder}", "algo.topk=6", "algo.steps=2")
    assert "algo.topk: the drafter knows 5 tokens, got 6" in said


@pytest.mark.parametrize("name", ["dflash", "target"])
def test_a_truncated_file_is_found_before_anything_is_decoded(tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(TINY / name, tmp_path / name)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    key = "model.path" if name == "target" else "model.draft_path"
    assert "the weights file is truncated or corrupt" in refusal("algo=dflash", f"{key}={folder}")


def test_a_tracker_without_its_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    assert "there is no key of api.wandb.ai" in refusal("tracker.mode=online")
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    check("tracker.mode=online")


def test_every_method_of_a_task_is_checked() -> None:
    with pytest.raises(UserError, match="got 200"):
        check("task=compare", "task.only=[ngram,dflash,wide]", "+task.methods.wide={name:dflash,block_size:200}")


@pytest.mark.parametrize(
    ("overrides", "methods", "backends", "sets"),
    [
        (["algo=ngram"], ["ngram"], ["fa4"], ["arithmetic"]),
        (["task=compare", "task.only=[ngram,dflash]", "data=jsonl", "data.path=nowhere"], ["ngram", "dflash"], ["fa4"],
         ["arithmetic", "code"]),
        (["task=losslessness", "task.only=[dflash]", "backend=torch"], ["dflash"], ["fa4", "torch", "hybrid"],
         ["arithmetic"]),
    ],
)  # fmt: skip
def test_a_plan_holds_what_its_task_uses(
    overrides: list[str], methods: list[str], backends: list[str], sets: list[str]
) -> None:
    plan = check(*overrides)
    assert list(plan.methods) == methods
    assert [backend.name for backend in plan.backends] == backends
    assert [workload.name for workload in plan.workloads] == sets
    for workload in plan.workloads:
        assert [request.id for request in workload.requests] == list(range(len(workload.prompts.prompts)))
        assert workload.max_length == max(request.max_length for request in workload.requests)


def test_folders_are_read_once_and_backends_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from algorithms.attention.backends.triton import TritonBackend
    from algorithms.models import loading
    from experiments.app import plan as plans

    calls: list[str] = []

    def counted(name: str, function: Any) -> Any:
        return lambda *arguments, **named: (calls.append(name), function(*arguments, **named))[1]

    monkeypatch.setattr(loading.target, "read_target", counted("target", loading.target.read_target))
    monkeypatch.setattr(plans, "read_target", loading.target.read_target)
    monkeypatch.setattr(plans, "resolve_hardware", counted("hardware", plans.resolve_hardware))
    monkeypatch.setattr(plans, "load_prompts", counted("prompts", plans.load_prompts))
    monkeypatch.setattr(TritonBackend, "__init__", counted("backend", TritonBackend.__init__))
    plan = check("algo=eagle3")
    with pytest.raises(AssertionError, match="weights were read"):
        plan.load_target()
    assert sorted(calls) == ["backend", "hardware", "prompts", "target"]


def test_a_varied_plan_leaves_the_first_as_it_is() -> None:
    plan = check("algo=ngram")
    varied = plan.varied(max_batch=7, page_size=1)
    assert (varied.config.runtime.max_batch, varied.config.runtime.page_size) == (7, 1)
    assert (plan.config.runtime.max_batch, plan.config.runtime.page_size) == (4, 16)
    assert varied.workloads is plan.workloads
