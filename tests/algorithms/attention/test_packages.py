"""FlashInfer and FlashAttention-4 as attention backends: results, refusals, and the signatures they rely on.

Without a GPU the packages are stand-ins (`fake_packages.py`) that check every argument and compute from them in
float64. On a GPU with a package installed the same comparisons run against the package.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from algorithms.attention.backends.flash_attention_4 import FlashAttention4
from algorithms.attention.backends.flashinfer import FlashInferBackend
from algorithms.attention.backends.packages import add_sinks, merge_states
from algorithms.attention.backends.protocol import BackendError
from specdec_kernels.attention import AttentionShape, paged_attention_with_lse, visible_keys
from specdec_kernels.attention.cases_inputs import attention_inputs, changed
from specdec_kernels.cases import Maker
from tests.algorithms import fake_packages, tape

KINDS = (FlashInferBackend, FlashAttention4)
# Two roundings of outputs of order 1: the parts of a tree and their sum.
TOLERANCE = {torch.float16: dict(rtol=4e-3, atol=4e-3), torch.bfloat16: dict(rtol=3e-2, atol=3e-2)}


@pytest.fixture
def standins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_packages.install(monkeypatch)
    yield


def inputs(
    mode: str, num_nodes: int, lengths: tuple[int, ...], make: Maker | None = None, **shape: Any
) -> dict[str, Any]:
    """A pool whose slots nobody sees are finite, as the packages demand."""
    shape = {"head_dim": 64, **shape}
    made = attention_inputs(make or Maker.seeded("cpu", torch.float16), mode, num_nodes, lengths, **shape)
    made["kv"].nan_to_num_(nan=3.0)
    return made


def build(kind: Any, impl: str = "reference") -> Any:
    return kind(impl) if kind is FlashAttention4 else kind(kind.Config(), impl)


@pytest.fixture(params=[None, *(pytest.param(dtype, marks=pytest.mark.gpu) for dtype in TOLERANCE)], ids=str)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """The stand-ins on the CPU, or the packages on a GPU in a dtype."""
    if request.param is not None:
        return Maker.seeded("cuda", request.param)
    fake_packages.install(monkeypatch)
    return Maker.seeded("cpu", torch.float16)


def built(kind: Any, place: Maker) -> Any:
    if reason := kind.unavailable():
        pytest.skip(reason)
    return build(kind, "auto" if place.device.type == "cuda" else "reference")


def plan(backend: Any, arguments: dict[str, Any], phase: str = "verify") -> Any:
    shape = AttentionShape.of(arguments["q"], arguments["kv"])
    return backend.plan(arguments["metadata"], shape, phase)


def through(backend: Any, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    q, kv, sinks = arguments["q"], arguments["kv"], arguments.get("sinks")
    return backend.run_with_lse(plan(backend, arguments), q, kv, sinks)


def expected(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    exact = arguments | dict(q=arguments["q"].double(), kv=arguments["kv"].double())
    return paged_attention_with_lse(**exact, impl="reference")


def agree(actual: tuple[torch.Tensor, torch.Tensor], truth: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = actual
    torch.testing.assert_close(out.double(), truth[0].double(), **TOLERANCE[out.dtype])
    torch.testing.assert_close(lse.double(), truth[1].double(), rtol=2e-3, atol=2e-3)


SHAPES = {
    "decode": ("chain", 1, (5, 40), {}),
    "first_token": ("chain", 1, (0,), {}),
    "chain": ("chain", 6, (0, 37, 11), {}),
    "chain_q_lens": ("chain", 6, (20, 40, 9, 3), {"q_lens": (2, 6, 0, 1)}),
    "prefill": ("chain", 40, (0, 0), {"q_lens": (40, 17)}),
    "block": ("block", 7, (20, 0), {}),
    "block_q_lens": ("block", 7, (20, 33), {"q_lens": (7, 3)}),
    "page_1": ("chain", 5, (9, 20), {"page_size": 1}),
    "page_odd": ("block", 5, (9, 20), {"page_size": 6}),
    "tree": ("tree", 9, (18, 0, 35), {}),
    "tree_q_lens": ("tree", 9, (18, 0, 35), {"q_lens": (9, 0, 4)}),
    "tree_two_words": ("tree", 70, (20,), {"heads": (2, 1)}),
    "tree_page_1": ("tree", 9, (18, 3), {"page_size": 1}),
    "chunks": ("chain", 3, (700, 5, 300), {"heads": (2, 1)}),
    "tree_chunks": ("tree", 40, (513, 40), {"heads": (4, 1)}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_results(place: Maker, kind: Any, shape: str) -> None:
    mode, nodes, lengths, options = SHAPES[shape]
    arguments = inputs(mode, nodes, lengths, place, **options)
    agree(through(built(kind, place), arguments), expected(arguments))


def dense(arguments: dict[str, Any], seen: torch.Tensor, cap: float | None, sinks: torch.Tensor | None) -> Any:
    """Attention over a dense visibility, written here once more."""
    q, kv = arguments["q"].double(), arguments["kv"].double()
    pages = arguments["metadata"].page_table.long().clamp(0, kv.shape[1] - 1)
    keys, values = (half[pages].flatten(1, 2)[:, : seen.shape[2]] for half in kv)
    group = q.shape[2] // kv.shape[3]
    scores = torch.einsum("bnhd,bshd->bnhs", q, keys.repeat_interleave(group, 2)) * q.shape[3] ** -0.5
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
    if sinks is not None:
        column = sinks.double().view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return torch.einsum("bnhs,bshd->bnhd", weights, values.repeat_interleave(group, 2)), scores.logsumexp(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("mode", ["chain", "block"])
def test_window_soft_cap_and_sinks(place: Maker, kind: Any, mode: str, window: int | None) -> None:
    arguments = inputs(mode, 6, (30, 0, 9), place)
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=place.device)
    call = changed(arguments, window=window, soft_cap=2.0, sinks=sinks)
    agree(through(built(kind, place), call), dense(arguments, visible_keys(call["metadata"], 6, 36), 2.0, sinks))


def test_flashinfer_window_over_a_tree_goes_by_depth(standins: None) -> None:
    """Two branches of three: slots 1 and 2 stand at one position, so slot 4 at depth 2 is 2 away from both."""
    arguments = inputs("tree", 5, (7,), page_size=4)
    depths = torch.tensor([[0, 1, 1, 2, 2]], dtype=torch.int32)
    words = torch.tensor([[0b00001, 0b00011, 0b00101, 0b01011, 0b10101]])
    call = changed(arguments, mask=words[..., None].contiguous(), window=2, depths=depths)
    distance = torch.tensor(
        # positions 0 … 6 of the prefix, then depths of the slots
        [[7 + own - key for key in [*range(7), 7, 8, 8, 9, 9]] for own in (0, 1, 1, 2, 2)]
    )
    ancestors = torch.tensor([[bool(int(words[0, row]) >> slot & 1) for slot in range(5)] for row in range(5)])
    seen = torch.cat([torch.ones(5, 7, dtype=torch.bool), ancestors], 1) & (distance < 2)
    agree(through(build(FlashInferBackend), call), dense(arguments, seen[None], None, None))


@pytest.mark.parametrize("rows", [2, 5])
def test_flashinfer_rows_anywhere_in_a_tree(standins: None, rows: int) -> None:
    """A drafter's level: its rows are the last slots of a tree of five that the mask describes."""
    whole = inputs("tree", 5, (7, 0), page_size=4)
    truth = expected(whole)
    q, mask = (x[:, 5 - rows :].contiguous() for x in (whole["q"], whole["metadata"].mask))
    level = changed(whole, q=q, mask=mask, tree_width=5)
    agree(through(build(FlashInferBackend), level), (truth[0][:, 5 - rows :], truth[1][:, 5 - rows :]))


def test_flashinfer_plans_interleave(standins: None) -> None:
    """A step's call is planned once for all lengths, and its buffers are filled again after another plan has used them;
    prompts are planned again."""
    chain, tree = inputs("chain", 3, (12,)), inputs("tree", 4, (9,))
    backend, shorter = build(FlashInferBackend), changed(chain, lengths=chain["metadata"].lengths - 2)
    first, second, third = (plan(backend, arguments) for arguments in (chain, tree, shorter))
    for arguments, planned in ((chain, first), (tree, second), (chain, first)):
        agree(backend.run_with_lse(planned, arguments["q"], arguments["kv"]), expected(arguments))
    assert [(made.backend, made.plans) for made in fake_packages.FakePrefillWrapper.made] == [("fa2", 1), ("fa2", 1)]
    assert third is not first
    prompts = [plan(backend, arguments, "prefill") for arguments in (chain, shorter)]
    agree(backend.run_with_lse(prompts[0], chain["q"], chain["kv"]), expected(chain))
    made = fake_packages.FakePrefillWrapper.made[-1]
    assert (made.backend, made.plans) == ("fa3", 3)


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_flashinfer_replays_other_lengths(standins: None, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """A captured call follows the lengths and pages: more chunks than at capture, fewer, and other pages."""
    tape.install(monkeypatch)
    call, outs = inputs(mode, 9, (300, 300, 300), heads=(4, 1)), []
    metadata, backend = call["metadata"], build(FlashInferBackend)
    metadata.lengths.copy_(torch.tensor((200, 5, 40)))
    captured = tape.Tape(lambda: outs.append(through(backend, call)))
    for lengths in ((5, 290, 0), (300, 300, 300), (17, 0, 130)):
        metadata.lengths.copy_(torch.tensor(lengths))
        metadata.page_table.copy_(metadata.page_table.flip(0))
        captured.replay()
        agree(outs[-1], expected(call))


@pytest.mark.parametrize("kind", KINDS)
def test_no_request_with_rows(standins: None, kind: Any) -> None:
    arguments = inputs("chain", 3, (12, 5), q_lens=(0, 0))
    out, lse = through(build(kind), arguments)
    assert not out.any() and bool((lse == float("-inf")).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_that_is_not_there_is_named(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages.install(monkeypatch)
    for name in ("flashinfer", "flash_attn.cute", "flash_attn"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "is not installed" in kind.unavailable()
    with pytest.raises(BackendError, match="is not installed"):
        plan(build(kind), inputs("chain", 1, (3,)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
@pytest.mark.parametrize("kind", KINDS)
def test_no_gpu_is_a_reason(kind: Any) -> None:
    assert kind.unavailable() == "it needs an NVIDIA GPU, torch sees none"


HALF = AttentionShape(1, 8, 2, 128, 16, torch.bfloat16, torch.bfloat16)
CPU = torch.device("cpu")
REFUSED = {
    "float32": (KINDS, dict(dtype=torch.float32), None, "float16 and bfloat16"),
    "fp8": (KINDS, dict(kv_dtype=torch.float8_e4m3fn), None, "dtype of the queries"),
    "head_dim_96": ((FlashInferBackend,), dict(head_dim=96), None, "head dimensions 64, 128, 256, got 96"),
    "head_dim_320": ((FlashAttention4,), dict(head_dim=320), None, "up to 256 as head dimension, got 320"),
    "tree_window": ((FlashAttention4,), {}, 64, "by depth"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_come_before_anything_runs(standins: None, name: str) -> None:
    kinds, change, window, reason = REFUSED[name]
    for kind in kinds:
        assert build(kind).refuse(HALF, "chain", None, CPU, "verify") is None
        assert reason in build(kind).refuse(HALF._replace(**change), "tree", window, CPU, "verify")


@pytest.mark.parametrize(
    "chip, served", [((8, 0), False), ((9, 0), True), ((10, 0), True), ((12, 0), False), (None, False)]
)
def test_flash_attention_reads_pages_on_two_generations(
    standins: None, monkeypatch: pytest.MonkeyPatch, chip: tuple[int, int] | None, served: bool
) -> None:
    monkeypatch.setattr("algorithms.attention.backends.packages.capability", lambda device: chip)
    assert (FlashAttention4().refuse(HALF, "chain", None, CPU, "verify") is None) == served
    monkeypatch.setattr("algorithms.attention.backends.packages.capability", lambda device: (10, 0))
    assert "up to 128" in FlashAttention4().refuse(HALF._replace(head_dim=256), "chain", None, CPU, "verify")


def test_merged_parts_are_the_whole() -> None:
    """Also where a part sees nothing and holds NaN, and where both do."""
    scores, values = torch.randn(3, 2, 9), torch.randn(9, 4)

    def over(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return scores[..., keys].softmax(-1) @ values[keys], scores[..., keys].logsumexp(-1)

    out, lse = merge_states(*over(slice(0, 4)), *over(slice(4, 9)))
    whole = over(slice(0, 9))
    torch.testing.assert_close((out, lse), whole)
    nothing = (torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf")))
    torch.testing.assert_close(merge_states(*nothing, *whole), whole)
    assert not merge_states(*nothing, *nothing)[0].any()
    sunk, grown = add_sinks(*whole, torch.tensor([0.0, 2.0]))
    with_sink = torch.cat([scores, torch.tensor([0.0, 2.0]).view(1, 2, 1).expand(3, 2, 1)], -1)
    torch.testing.assert_close(sunk, with_sink.softmax(-1)[..., :9] @ values)
    torch.testing.assert_close(grown, with_sink.logsumexp(-1))


def real_signature(module: str, path: str) -> list[str]:
    """Parameters of an installed package's function; skips where there is none."""
    try:
        found: Any = importlib.import_module(module)
    except Exception as failure:
        pytest.skip(f"{module} cannot be imported: {failure}")
    for name in path.split("."):
        found = getattr(found, name)
    return [name for name in inspect.signature(found).parameters if name not in ("self", "args")]


@pytest.mark.parametrize(
    "module, path, recorded",
    [
        ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.__init__", fake_packages.FLASHINFER_INIT),
        ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.plan", fake_packages.FLASHINFER_PLAN),
        ("flashinfer", "BatchPrefillWithPagedKVCacheWrapper.run", fake_packages.FLASHINFER_RUN),
        ("flash_attn.cute", "flash_attn_varlen_func", fake_packages.FLASH_ATTENTION_VARLEN),
    ],
)
def test_recorded_signatures_are_the_packages_own(module: str, path: str, recorded: list[str]) -> None:
    """Another version may add parameters; it may not lose or reorder those that were recorded."""
    actual = real_signature(module, path)
    assert [name for name in actual if name in recorded] == recorded
