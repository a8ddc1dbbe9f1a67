"""Attention backends: every pair computes the same, a plan goes where its phase says, and refusals name the reason.
`test_packages` and `test_paged_attention` compare each with definitions."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from algorithms.attention.backends import backends
from algorithms.attention.backends.protocol import FORWARD_PHASES, Backend, BackendError, LayerInputs
from specdec_kernels import AttentionMetadata, AttentionShape
from specdec_kernels.attention.cases_inputs import attention_inputs
from specdec_kernels.cases import Maker
from tests.algorithms import fake_packages
from tests.algorithms.toy import CONFIG


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
    return backend.run(planned(backend, metadata, q, kv, phase), LayerInputs(q, kv, sinks))


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


@pytest.mark.parametrize("backend", PLAIN)
def test_a_result_may_have_a_place(standins: None, backend: str) -> None:
    metadata, q, kv = forward("chain", 4, (17, 0), q_lens=(4, 0))
    one, place = plain(backend), torch.full_like(q, float("nan"))
    expected = through(one, metadata, q, kv)
    result = one.run(planned(one, metadata, q, kv), LayerInputs(q, kv, out=place))
    assert torch.equal(result, expected) and (result is place or bool(place.isnan().all()))


@pytest.mark.parametrize("backend", ["torch", "fa4"])
def test_a_bound_of_the_length_may_lie_beyond_the_table(backend: str) -> None:
    metadata, q, kv = forward("chain", 4, (17, 3))
    beyond = metadata._replace(max_length=metadata.page_table.shape[1] * kv.shape[2] + 5)
    expected = through(plain(backend), metadata, q, kv)
    torch.testing.assert_close(through(plain(backend), beyond, q, kv), expected, rtol=4e-3, atol=4e-3)


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
def test_a_tile_schedule_changes_nothing(name: str) -> None:
    """It is made by `plan`, also for a wide bound as a captured graph has it."""
    phase, where, shape = FORWARDS[name]
    metadata, q, kv = forward(*where, **shape)
    metadata = metadata._replace(max_length=500)
    kind = backends()["fa4"]
    listed, plain = (kind(kind.Config(tile_schedule=on), "triton") for on in (True, False))
    plan = planned(listed, metadata, q, kv, phase)
    assert plan.tile_schedule is not None and planned(plain, metadata, q, kv, phase).tile_schedule is None
    first, again = (listed.run(plan, LayerInputs(q, kv)) for _ in range(2))
    assert torch.equal(first, through(plain, metadata, q, kv, phase)) and torch.equal(again, first)


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
        Backend.check(backend, CONFIG, modes, 16, torch.float32, device, "the drafter")


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


def test_prompts_are_captured_where_their_backend_reads_nothing_back(standins: None) -> None:
    kinds = backends()
    for config, prompts in (
        (kinds["fa4"].Config(), True),
        (kinds["fa4"].Config(dispatch="flash_attention_4"), True),
        (kinds["torch"].Config(), False),
        (kinds["flashinfer"].Config(), False),
        (kinds["hybrid"].Config(prefill="fa4", decode="torch"), True),
        (kinds["hybrid"].Config(prefill="flashinfer", decode="fa4"), False),
    ):
        assert kinds[config.name](config, "reference").captures_prompts == prompts
