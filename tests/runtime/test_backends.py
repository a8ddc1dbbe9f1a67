"""Attention backends: every pair computes the same, a plan goes where its phase says, and refusals name the reason."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.runtime.backends.protocol import FORWARD_PHASES, BackendError, Levels
from algorithms.runtime.backends.registry import backends, check_calls
from algorithms.runtime.backends.torch import _gathered
from algorithms.runtime.engine import Engine
from algorithms.runtime.engine_settings import EngineSettings
from specdec_kernels import AttentionMetadata, AttentionShape
from specdec_kernels.attention.cases_inputs import attention_inputs
from specdec_kernels.attention.configs import UNSPLIT
from specdec_kernels.cases import Maker
from tests.algorithms.toy import CONFIG, Scripted, Setup, answers, random_target, requests, scripts, spell
from tests.runtime import fake_packages


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_packages.install(monkeypatch)
    yield


def build(name: str, **options: Any) -> Any:
    kind = backends()[name]
    return kind(kind.Config(**options), "reference")


def forward(mode: str, num_nodes: int, lengths: tuple[int, ...], **shape: Any) -> tuple[AttentionMetadata, Any, Any]:
    """Metadata, queries and the KV of one layer, in float16 as the packages take it."""
    made = attention_inputs(Maker.seeded("cpu", torch.float16), mode, num_nodes, lengths, head_dim=64, **shape)
    metadata, kv = made["metadata"], made["kv"]
    table = metadata.page_table.clamp(max=kv.shape[1] - 1)
    metadata = metadata._replace(page_table=table, max_length=max(lengths) + num_nodes)
    return metadata, made["q"], kv.nan_to_num_(nan=0.0)


def planned(backend: Any, metadata: AttentionMetadata, q: Any, kv: Any, phase: str = "verify") -> Any:
    return backend.plan(metadata, AttentionShape.of(q, kv), phase)


def through(
    backend: Any, metadata: AttentionMetadata, q: Any, kv: Any, phase: str = "verify", sinks: Any = None
) -> torch.Tensor:
    return backend.run(planned(backend, metadata, q, kv, phase), q, kv, sinks)


FORWARDS = {
    "prefill": ("prefill", ("chain", 20, (0, 0)), dict(q_lens=(20, 7))),
    "decode": ("decode", ("chain", 1, (17, 30)), {}),
    "padding_row": ("verify", ("chain", 4, (17, 0)), dict(q_lens=(4, 0))),
    "verify_tree": ("verify", ("tree", 9, (17, 30)), {}),
    "draft_block": ("draft", ("block", 6, (17, 30)), {}),
}
PLAIN = ("fa4", "flashinfer", "torch", "package")


def plain(name: str) -> Any:
    return build("fa4", dispatch="flash_attention_4") if name == "package" else build(name)


@pytest.mark.parametrize("name", FORWARDS)
@pytest.mark.parametrize("backend", [name for name in PLAIN if name != "torch"])
def test_all_backends_compute_the_same(standins: None, backend: str, name: str) -> None:
    phase, where, shape = FORWARDS[name]
    metadata, q, kv = forward(*where, **shape)
    expected = through(build("torch"), metadata, q, kv)
    torch.testing.assert_close(through(plain(backend), metadata, q, kv, phase), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("backend", PLAIN)
def test_a_result_may_have_a_place(standins: None, backend: str) -> None:
    metadata, q, kv = forward("chain", 4, (17, 0), q_lens=(4, 0))
    one, place = plain(backend), torch.full_like(q, float("nan"))
    expected = through(one, metadata, q, kv)
    assert one.run(planned(one, metadata, q, kv), q, kv, out=place) is place and torch.equal(place, expected)


@pytest.mark.parametrize("backend", ["torch", "fa4"])
def test_a_bound_of_the_length_may_lie_beyond_the_table(backend: str) -> None:
    metadata, q, kv = forward("chain", 4, (17, 3))
    beyond = metadata._replace(max_length=metadata.page_table.shape[1] * kv.shape[2] + 5)
    expected = through(plain(backend), metadata, q, kv)
    torch.testing.assert_close(through(plain(backend), beyond, q, kv), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("options", [dict(window=3), dict(soft_cap=1.5), dict(sinks=True), dict(scale=0.3)])
@pytest.mark.parametrize("mode", ["chain", "block"])
@pytest.mark.parametrize("backend", ["fa4", "flashinfer", "package"])
def test_options_mean_the_same(standins: None, backend: str, mode: str, options: dict[str, Any]) -> None:
    metadata, q, kv = forward(mode, 5, (17, 0))
    sinks = torch.tensor([0.3, -2.0, 4.0, 1.0]) if "sinks" in options else None
    without = through(build("torch"), metadata, q, kv)
    metadata = metadata if "sinks" in options else metadata._replace(**options)
    expected = through(build("torch"), metadata, q, kv, sinks=sinks)
    assert not torch.allclose(expected, without, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(through(plain(backend), metadata, q, kv, sinks=sinks), expected, rtol=4e-3, atol=4e-3)


def test_a_level_of_a_tree(standins: None) -> None:
    """The last rows of a tree, whose mask describes all of it: the same rows as of the whole."""
    metadata, q, kv = forward("tree", 6, (17, 0))
    whole = through(build("torch"), metadata, q, kv)[:, 4:]
    assert metadata.mask is not None
    level = metadata._replace(mask=metadata.mask[:, 4:].contiguous(), tree_width=6)
    for name in ("torch", "flashinfer"):
        out = through(build(name), level, q[:, 4:].contiguous(), kv)
        torch.testing.assert_close(out, whole, rtol=4e-3, atol=4e-3)


def test_a_window_over_a_tree_goes_by_depth(standins: None) -> None:
    """A star: all nodes are at depth 1 behind node 0, so a window of 2 shows node 0 to each of them."""
    metadata, q, kv = forward("tree", 5, (17,))
    words = torch.tensor([[1, 0b00011, 0b00101, 0b01001, 0b10001]])[..., None].contiguous()
    depths = torch.tensor([[0, 1, 1, 1, 1]], dtype=torch.int32)
    star = metadata._replace(mask=words, window=2, depths=depths)
    out = through(build("torch"), star, q, kv)
    torch.testing.assert_close(through(build("flashinfer"), star, q, kv), out, rtol=4e-3, atol=4e-3)
    for node in range(1, 5):
        alone = metadata._replace(mode="chain", mask=None, window=2)
        swapped = kv.clone()
        slot = metadata.page_table[0, (17 + torch.tensor([1, node])) // kv.shape[2]].long()
        place = (17 + torch.tensor([1, node])) % kv.shape[2]
        swapped[:, slot[0], place[0]] = kv[:, slot[1], place[1]]
        expected = through(build("torch"), alone, q[:, [0, node]].contiguous(), swapped)[:, 1]
        torch.testing.assert_close(out[:, node], expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("prefill", ["fa4", "flashinfer", "torch"])
@pytest.mark.parametrize("decode", ["fa4", "flashinfer", "torch"])
def test_hybrid_routes_by_phase(standins: None, prefill: str, decode: str) -> None:
    for verify, draft in (("prefill", "decode"), ("decode", "prefill")):
        hybrid = build("hybrid", prefill=prefill, decode=decode, verify=verify, draft=draft)
        sides = dict(prefill=prefill, decode=decode)
        for phase, side in dict(prefill="prefill", decode="decode", verify=verify, draft=draft).items():
            metadata, q, kv = forward("tree", 5, (17, 3))
            out = through(hybrid, metadata, q, kv, phase)
            torch.testing.assert_close(out, through(build("torch"), metadata, q, kv), rtol=4e-3, atol=4e-3)
            assert hybrid.served[phase].startswith(sides[side]), (phase, hybrid.served)
        assert set(hybrid.served) == set(FORWARD_PHASES)


def test_sides_of_a_hybrid_have_settings_of_their_own(standins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = backends()
    given: dict[str, Any] = {}
    for name in ("fa4", "flashinfer"):
        init = kinds[name].__init__

        def noted(self: Any, config: Any, impl: str, deterministic: bool, name: str = name, init: Any = init) -> None:
            given[name] = config
            init(self, config, impl)

        monkeypatch.setattr(kinds[name], "__init__", noted)
    fa4, flashinfer = kinds["fa4"].Config(split_tokens=64), kinds["flashinfer"].Config(kernel="fa2", workspace_mb=3)
    build("hybrid", prefill="flashinfer", decode="fa4", fa4=fa4, flashinfer=flashinfer)
    assert given == {"fa4": fa4, "flashinfer": flashinfer}
    package = kinds["fa4"].Config(dispatch="flash_attention_4")
    assert not kinds["hybrid"].Config(prefill="torch", decode="fa4", fa4=package).capturable
    assert kinds["hybrid"].Config(prefill="fa4", decode="torch", fa4=package).capturable


def test_who_captures_prompts() -> None:
    kinds = backends()
    for config, able in (
        (kinds["fa4"].Config(), True),
        (kinds["fa4"].Config(dispatch="auto"), False),
        (kinds["torch"].Config(), False),
        (kinds["hybrid"].Config(prefill="fa4", decode="torch"), True),
        (kinds["hybrid"].Config(fa4=kinds["fa4"].Config(dispatch="auto"), prefill="fa4", decode="torch"), False),
    ):
        assert kinds[config.name](config, "reference").captures_prompts == able


def test_settings_of_a_side_are_typed_under_its_name() -> None:
    import hydra

    from experiments.app.compose import build_config, register
    from experiments.app.errors import UserError
    from experiments.app.schema import CONFIG_FOLDER

    register()
    with hydra.initialize_config_dir(config_dir=str(CONFIG_FOLDER), version_base="1.3"):

        def built(*overrides: str) -> Any:
            return build_config(hydra.compose("config", overrides=["backend=hybrid", *overrides])).backend

        config = built("backend.prefill=flashinfer", "backend.fa4.dispatch=auto", "backend.flashinfer.kernel=fa3")
        assert (config.fa4.dispatch, config.flashinfer.kernel) == ("auto", "fa3")
        assert isinstance(config.fa4, backends()["fa4"].Config)
        with pytest.raises(UserError, match="dispatch: expected one of"):
            built("backend.fa4.dispatch=fa3")
        with pytest.raises(UserError, match="backend.flashinfer is set, and serves neither"):
            built("backend.flashinfer.kernel=fa3")
        with pytest.raises(UserError, match="backend.fa4.name: expected fa4, got 'torch'"):
            built("backend.fa4.name=torch")


@pytest.mark.parametrize("name", FORWARDS)
def test_a_work_list_changes_nothing(name: str) -> None:
    """It is made by `plan`, also for a wide bound as a captured graph has it."""
    phase, where, shape = FORWARDS[name]
    metadata, q, kv = forward(*where, **shape)
    metadata = metadata._replace(max_length=500)
    kind = backends()["fa4"]
    listed, plain = (kind(kind.Config(work_list=on), "triton") for on in (True, False))
    plan = planned(listed, metadata, q, kv, phase)
    assert plan.work_list is not None and planned(plain, metadata, q, kv, phase).work_list is None
    first = listed.run(plan, q, kv)
    assert torch.equal(first, through(plain, metadata, q, kv, phase)) and torch.equal(listed.run(plan, q, kv), first)


@pytest.mark.parametrize(("split_tokens", "prompts"), [(None, UNSPLIT), (64, 64)])
def test_prompts_are_not_split_unless_a_size_is_given(split_tokens: int | None, prompts: int) -> None:
    backend = build("fa4", split_tokens=split_tokens)
    assert {phase: backend._cut(phase) for phase in FORWARD_PHASES} == {
        phase: dict(split_tokens=prompts if phase == "prefill" else split_tokens) for phase in FORWARD_PHASES
    }


def test_all_phases_but_the_draft_are_cut_alike_where_bits_must_be_the_same() -> None:
    kind = backends()["fa4"]
    backend = kind(kind.Config(), "triton", True)
    same = dict(split_tokens=None, batch_invariant=True)
    assert {phase: backend._cut(phase) for phase in FORWARD_PHASES} == {
        "prefill": same | dict(in_order=True),
        "decode": same | dict(in_order=None),
        "verify": same | dict(in_order=None),
        "draft": dict(split_tokens=None),
    }


@pytest.mark.parametrize("listed", [True, False])
def test_levels_are_planned_at_once(standins: None, listed: bool) -> None:
    """With a work list for each or without, but not by the package, and not where there are none."""
    kind = backends()["fa4"]
    metadata, q, kv = forward("chain", 1, (17, 30))
    calls = [metadata._replace(lengths=metadata.lengths + step) for step in range(3)]
    shape, levels = AttentionShape.of(q, kv), Levels(calls, length_step=1)
    for dispatch in ("triton", "auto"):
        backend = kind(kind.Config(dispatch=dispatch, work_list=listed), "triton")
        plans = backend.plan_levels(levels, shape, "draft")
        assert [plan.metadata for plan in plans] == calls and backend.served == {"draft": "fa4: triton"}
        assert all(((plan.work_list is not None), plan.cut) == (listed, backend._cut("draft")) for plan in plans)
        assert backend.plan_levels(Levels([]), shape, "draft") is None
    assert build("fa4", dispatch="flash_attention_4").plan_levels(levels, shape, "draft") is None


def test_a_side_of_a_hybrid_is_asked_what_the_hybrid_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    hybrid = build("hybrid", prefill="torch", decode="fa4")
    given: list[tuple[Any, ...]] = []
    for side in hybrid._sides.values():
        for name in ("refuse", "plan", "plan_levels", "run"):
            monkeypatch.setattr(side, name, lambda *what, side=side, name=name: given.append((side.name, name, *what)))
    assert hybrid.refuse("shape", "tree", 5, "device", "prefill") is None
    assert hybrid.plan_levels("levels", "shape", "draft") is None
    plan = hybrid.plan("metadata", "shape", "verify")
    hybrid.run(plan, "q", "kv", "sinks", "scales", "out")
    assert given == [
        ("torch", "refuse", "shape", "tree", 5, "device", "prefill"),
        ("fa4", "plan_levels", "levels", "shape", "draft"),
        ("fa4", "plan", "metadata", "shape", "verify"),
        ("fa4", "run", None, "q", "kv", "sinks", "scales", "out"),
    ]


def test_the_package_is_asked_what_the_backend_is_asked(standins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = build("fa4", dispatch="flash_attention_4")
    given: list[tuple[Any, ...]] = []
    for name in ("refuse", "plan"):
        monkeypatch.setattr(backend._package, name, lambda *what, name=name: given.append((name, *what)))
    metadata: Any = SimpleNamespace(mode="tree", window=5, lengths=SimpleNamespace(device="device"))
    assert backend.refuse("shape", "tree", 5, "device", "verify") is backend.plan(metadata, "shape", "verify") is None
    asked = ("refuse", "shape", "tree", 5, "device", "verify")
    assert given == [asked, asked, ("plan", metadata, "shape", "verify")]


@pytest.mark.parametrize("scaled", [True, False])
def test_float8_keys_are_gathered_by_their_bytes(scaled: bool) -> None:
    half = torch.linspace(-4, 4, 48).view(4, 2, 2, 3)
    slots, factor = torch.tensor([[7, 0], [3, 3]]), torch.tensor([0.5, 4.0]) if scaled else None
    for dtype in (torch.float32, torch.float8_e4m3fn):
        stored = half.to(dtype)
        expected = stored.float().flatten(0, 1)[slots]
        if dtype != torch.float32 and factor is not None:
            expected = expected * factor[:, None]
        assert torch.equal(_gathered(stored, slots, torch.float32, factor), expected)


def test_auto_sends_prompts_to_the_package_and_says_so(standins: None) -> None:
    backend = build("fa4", dispatch="auto")
    metadata, q, kv = forward("chain", 5, (17, 0))
    for phase in ("prefill", "verify"):
        through(backend, metadata, q, kv, phase)
    assert backend.served == {"prefill": "fa4: flash_attention_4", "verify": "fa4: reference"}
    through(backend, metadata, q.float(), kv.float(), "prefill")
    assert backend.served["prefill"] == (
        "fa4: reference (flash_attention_4 not used: it takes float16 and bfloat16, the queries are torch.float32)"
    )


def test_the_package_by_name_is_never_replaced(standins: None) -> None:
    metadata, q, kv = forward("chain", 5, (17, 0))
    with pytest.raises(BackendError, match="flash_attention_4: it takes float16 and bfloat16"):
        through(build("fa4", dispatch="flash_attention_4"), metadata, q.float(), kv.float())


def test_refusals_name_the_side_and_the_reason(standins: None) -> None:
    shape = AttentionShape(1, 8, 2, 96, 16, torch.bfloat16, torch.bfloat16)
    needs = (shape, "tree", None, torch.device("cpu"))
    hybrid = build("hybrid", prefill="flashinfer", decode="fa4", verify="prefill")
    reason = "it takes head dimensions 64, 128, 256, got 96"
    assert hybrid.refuse(*needs, "verify") == f"flashinfer for verify: {reason}"
    assert hybrid.refuse(*needs, "draft") is None
    assert build("flashinfer").refuse(*needs, "decode") == reason
    assert build("torch").refuse(*needs, "decode") is None and build("fa4").refuse(*needs, "verify") is None


@pytest.mark.parametrize(("name", "others"), [("fa4", "torch"), ("torch", "fa4"), ("flashinfer", "fa4 or torch")])
def test_another_backend_is_named_where_one_refuses(name: str, others: str) -> None:
    backend: Any = SimpleNamespace(name=name, refuse=lambda *call: "no" if call[-1] == "verify" else None)
    modes, device = {"prefill": "chain", "verify": "tree"}, torch.device("cpu")
    expected = f"^backend={name} cannot serve verify of the drafter here: no; use backend={others}$"
    with pytest.raises(BackendError, match=expected):
        check_calls(backend, CONFIG, modes, 16, torch.float32, device, "the drafter")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
@pytest.mark.parametrize(
    "name, options, message",
    [
        ("flashinfer", {}, "backend=flashinfer: it needs an NVIDIA GPU, torch sees none; use backend=fa4 or"),
        ("fa4", dict(dispatch="flash_attention_4"), "backend.dispatch=flash_attention_4: it needs an NVIDIA GPU"),
        ("hybrid", dict(decode="flashinfer"), "backend=flashinfer: it needs an NVIDIA GPU"),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused_when_built(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        build(name, **options)


def test_graphs_need_a_backend_that_reads_nothing_back(standins: None) -> None:
    kinds = backends()
    for config, able in (
        (kinds["fa4"].Config(), True),
        (kinds["fa4"].Config(dispatch="auto"), True),
        (kinds["fa4"].Config(dispatch="flash_attention_4"), False),
        (kinds["torch"].Config(), True),
        (kinds["flashinfer"].Config(), False),
        (kinds["hybrid"].Config(prefill="flashinfer", decode="fa4"), True),
        (kinds["hybrid"].Config(prefill="flashinfer", decode="fa4", verify="prefill"), False),
        (kinds["hybrid"].Config(prefill="fa4", decode="flashinfer"), False),
    ):
        assert config.capturable == kinds[config.name](config, "reference").capturable == able
    assert [name for name, kind in kinds.items() if kind.Config().capturable] == ["fa4", "hybrid", "torch"]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("hybrid", dict(prefill="fa5"), "backend.prefill: expected one of fa4, flashinfer, torch, got 'fa5'"),
        ("hybrid", dict(decode="hybrid"), "backend.decode: expected one of fa4, flashinfer, torch, got 'hybrid'"),
        ("hybrid", dict(verify="draft"), "backend.verify: expected one of prefill, decode, got 'draft'"),
        ("hybrid", dict(draft="torch"), "backend.draft: expected one of prefill, decode, got 'torch'"),
        ("fa4", dict(dispatch="fa3"), "backend.dispatch: expected one of triton, auto, flash_attention_4, got 'fa3'"),
        ("fa4", dict(split_tokens=8), "backend.split_tokens: expected at least 16 or null, got 8"),
        ("flashinfer", dict(kernel="fa1"), "backend.kernel: expected one of auto, fa2, fa3, got 'fa1'"),
        ("flashinfer", dict(workspace_mb=0), "backend.workspace_mb: expected at least 1, got 0"),
    ],
)
def test_options_are_checked_when_composed(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backends()[name].Config(**options)


@pytest.mark.parametrize("decoys", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("sides", [("fa4", "torch"), ("torch", "fa4")], ids="-".join)
def test_hybrid_writes_what_one_backend_writes(sides: tuple[str, str], page_size: int, decoys: bool) -> None:
    """The engine with prompts and drafts on different backends, in float32: token for token."""
    target, asked = random_target(), requests(4, max_new_tokens=10)
    written = answers(asked, Setup(backend="torch", max_batch=1), target)
    kind = backends()["hybrid"]
    for verify in ("prefill", "decode"):
        config = kind.Config(prefill=sides[0], decode=sides[1], verify=verify)
        built = kind(config, "reference")
        drafter = Scripted(scripts(asked, written), 3, lambda at, d: (at + d) % 3 != 0, decoys)
        got = run_on(built, drafter, asked, page_size, target)
        assert got == written
        assert built.served["prefill"].startswith(sides[0])
        assert built.served["verify"].startswith(dict(prefill=sides[0], decode=sides[1])[verify])


def run_on(backend: Any, drafter: Any, asked: Any, page_size: int, target: Any) -> list[list[int]]:
    """Token ids that an engine over `backend` writes."""
    settings = EngineSettings(page_size=page_size, max_batch=3, max_length=64, impl="reference")
    engine = Engine(target, drafter, backend, settings, spell)
    return [completion.token_ids for completion in engine.generate(asked).completions]
