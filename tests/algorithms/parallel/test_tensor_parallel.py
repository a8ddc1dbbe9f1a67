"""Two processes that share a target write what one process writes, and every rank writes the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from algorithms.algorithm import Algorithm, DraftTree
from algorithms.dflash.model import DFlashDrafter
from algorithms.eagle.drafting import Eagle3
from algorithms.models.dense_mixer import DenseMixer
from algorithms.models.loading import Target
from algorithms.parallel import collectives, layers
from algorithms.parallel.collectives import from_rank_0, join_columns, sum_in_order, sum_over_ranks
from algorithms.parallel.layers import RowParallelLinear
from algorithms.parallel.sharding import parallel_config, shard, shard_drafter
from specdec_kernels import Exchange, build_chain, exchange_elements, linear_argmax
from specdec_kernels.cases import Maker
from specdec_kernels.launch import interpreting
from specdec_kernels.projection.cases import argmax_inputs
from tests.algorithms import toy
from tests.algorithms.drafters import eagle3_head, eagle_head, hinted, mtp_head, peagle_head
from tests.algorithms.layer_kinds import KINDS, target_of
from tests.programs import fork_server

WORLD = 2
ASKED = [toy.changed(r, temperature=(0.0, 0.9)[r.id % 2]) for r in toy.requests(4, max_new_tokens=8)]


def eagle3_over(target: Target, texts: list[list[int]], **shape: int) -> Algorithm:
    """A random head, shared as its target is; its drafts are right now and then."""
    head = eagle3_head()
    shard_drafter(head)
    head.bind(target.model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("algorithms.eagle.loading.load_eagle", lambda *_: head)
        return hinted(Eagle3(Eagle3.Config(**shape), target, "random"), texts)


Outputs = list[tuple[list[int], list[int]]]
"""Tokens and accepted drafts of each request."""


def _outputs(algorithm: Algorithm, setup: toy.Setup, target: Target) -> Outputs:
    return [(c.token_ids, c.accepted_counts) for c in toy.run(algorithm, ASKED, setup, target).completions]


def _of_attention(rank: int, texts: list[list[int]]) -> list[Outputs]:
    whole = toy.random_target()
    with torch.no_grad():
        model = shard(whole.model, rank, WORLD)
    target, plain = Target(model.config, whole.path, model), toy.Setup(max_batch=2)
    fused, adaptive = replace(plain, fused=True), replace(plain, adaptive=True)
    runs = (
        (toy.autoregressive(target), plain),
        # Each rank's own drafter is wrong in other places: without agreement the ranks would part ways.
        (toy.Scripted(texts, 3, lambda at, d: (at + d + rank) % 3 != 0), plain),
        (toy.Scripted(texts, 3, lambda at, d: (at + d + rank) % 4 != 0, decoys=True), plain),
        (eagle3_over(target, texts, steps=3), plain),
        (eagle3_over(target, texts, steps=3, topk=2, num_nodes=7), plain),
        (eagle3_over(target, texts, steps=3), fused),
        (toy.autoregressive(target), fused),
        # The clocks of the ranks differ; rank 0's decides how many nodes a step has.
        (eagle3_over(target, texts, steps=3), adaptive),
    )
    return [_outputs(algorithm, setup, target) for algorithm, setup in runs]


def _of_kind(rank: int, kind: str, texts: list[list[int]]) -> Outputs:
    """Trees, so that a commit takes states and stored rows along the accepted path."""
    whole = target_of(kind)
    model = shard(whole.model, rank, WORLD)
    drafter = toy.Scripted(texts, 3, lambda at, d: (at + d + rank) % 4 != 0, decoys=True)
    return _outputs(drafter, toy.Setup(max_batch=2), Target(model.config, whole.path, model))


def _rank(rank: int, texts: dict[str, list[list[int]]], memory: torch.Tensor, folder: str) -> None:
    """All that a rank computes; to start a process takes longer."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    with pytest.MonkeyPatch.context() as patch:
        toy.time_once(patch)
        found = {
            "attention": _of_attention(rank, texts["attention"]),
            **{kind: _of_kind(rank, kind, texts[kind]) for kind in KINDS},
            "choices": _choices(rank, memory) if interpreting() else [],
            "exchanged": _collectives(rank),
        }
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def alone() -> dict[str, list[list[int]]]:
    """What one process writes, by the kind of its target's layers."""
    targets = {"attention": toy.random_target()} | {kind: target_of(kind) for kind in KINDS}
    return {kind: toy.answers(ASKED, toy.Setup(max_batch=2), target) for kind, target in targets.items()}


@pytest.fixture(scope="module")
def ranks(alone: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has computed."""
    folder, texts = tmp_path_factory.mktemp("ranks"), {kind: toy.scripts(ASKED, ids) for kind, ids in alone.items()}
    memory = torch.zeros(WORLD * exchange_elements(WORLD, 4, 2), dtype=torch.int64).share_memory_()
    fork_server()
    mp.start_processes(_rank, (texts, memory, str(folder)), nprocs=WORLD, start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


def test_two_ranks_write_what_one_does(ranks: list[dict[str, Any]], alone: dict[str, list[list[int]]]) -> None:
    first, second = (found["attention"] for found in ranks)
    assert first == second
    for output in first:
        assert [tokens for tokens, _ in output] == alone["attention"]
    for output in first[1:-2]:
        assert max(count for _, counts in output for count in counts) >= 2


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_share_every_kind_of_layer(
    ranks: list[dict[str, Any]], alone: dict[str, list[list[int]]], kind: str
) -> None:
    first, second = (found[kind] for found in ranks)
    assert first == second and [tokens for tokens, _ in first] == alone[kind]
    assert max(count for _, counts in first for count in counts) >= 2


def _sums_of_rows(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """What this rank gives to a sum of 70 rows, the sum of all rows and of one at a time, and the same behind a
    projection with the norm behind it, which may not exchange few rows in another way than many."""
    rows = torch.randn(70, 8, generator=torch.Generator().manual_seed(rank)).bfloat16()
    assert torch.equal(sum_in_order(rows), torch.cat([sum_in_order(row[None]) for row in rows]))
    layers.exchange_of = lambda _: None  # type: ignore[assignment]
    whole = torch.nn.Linear(16, 8, bias=False).requires_grad_(False)
    torch.nn.init.orthogonal_(whole.weight, generator=torch.Generator().manual_seed(5))
    projection = RowParallelLinear(whole, slice(8 * rank, 8 * rank + 8), slot=0)
    projection.impl, projection.batch_invariant = "reference", True
    x, one = torch.arange(640.0).view(80, 8).sin() + rank, torch.ones(8)
    normed = projection.add_rms_norm(x, torch.ones(80, 8), one, 1e-6)
    few = projection.add_rms_norm(x[3:4], torch.ones(1, 8), one, 1e-6)
    return rows, sum_in_order(rows), normed[0][3:4], few[0]


def _biased(rank: int, impl: str | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Outputs of a projection with a bias, of its share on this rank, and of the share with the norm that follows."""
    whole = torch.nn.Linear(16, 8).requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    whole.weight.copy_(torch.randn(8, 16, generator=generator))
    whole.bias.copy_(100 + torch.arange(8.0))
    share = RowParallelLinear(whole, slice(8 * rank, 8 * rank + 8), slot=0)
    share.impl = impl
    x = torch.randn(3, 16, generator=generator)
    own = x[:, 8 * rank : 8 * rank + 8].contiguous()
    if impl is None:
        return whole(x), share(own), whole(x)
    normed = share.add_rms_norm(own, torch.zeros(3, 8), torch.ones(8), 1e-6)
    return whole(x), share(own), normed[1]


def _of_rows(drafter: Any) -> torch.Tensor:
    """Outputs of five rows of a drafter's layers, each attending to those before it."""
    generator, width = torch.Generator().manual_seed(3), toy.CONFIG.hidden_size
    rows, mixer = torch.randn(1, 5, width, generator=generator), DenseMixer(drafter.config.decoder, 5, "cpu")
    return drafter(rows, mixer) if isinstance(drafter, DFlashDrafter) else drafter(torch.arange(5)[None], rows, mixer)


@torch.no_grad()
def _drafters() -> None:
    for head in (eagle_head, eagle3_head, peagle_head, mtp_head, toy.random_drafter):
        whole, share = head(), head()
        shard_drafter(share)
        assert share.config.decoder.num_heads == toy.CONFIG.num_heads // WORLD
        assert share.state_dict().keys() == whole.state_dict().keys()
        torch.testing.assert_close(_of_rows(share), _of_rows(whole), atol=1e-5, rtol=1e-5)
    odd = toy.random_drafter()
    odd.config = replace(odd.config, decoder=replace(odd.config.decoder, num_kv_heads=1))
    shard_drafter(odd)
    assert odd.config.decoder.num_heads == toy.CONFIG.num_heads  # it stays whole


def _collectives(rank: int) -> list[torch.Tensor]:
    sent = [torch.arange(5) + rank, torch.full((3, 1), rank, dtype=torch.int32), torch.tensor([rank == 0, True, False])]
    found = from_rank_0(sent)
    assert all(tensor.data_ptr() % 16 == found[0].data_ptr() % 16 for tensor in found)
    columns = join_columns(torch.arange(6.0).view(2, 3) + 10 * rank)
    saved = [*(tensor.clone() for tensor in found), columns, sum_over_ranks(torch.ones(2, 2) * (rank + 1))]
    for impl in (None, "reference"):
        alone, shared, residual = _biased(rank, impl)
        torch.testing.assert_close(shared, alone)  # each rank adds the bias to the sum, none to its part
        torch.testing.assert_close(residual, alone)
    _drafters()
    return [*saved, *_sums_of_rows(rank)]


def test_ranks_exchange_sums_columns_and_decisions(ranks: list[dict[str, Any]]) -> None:
    exchanged = [found["exchanged"] for found in ranks]
    for numbers, column, flags, columns, total, _, in_order, many, few in exchanged:
        assert torch.equal(in_order, (exchanged[0][5].float() + exchanged[1][5].float()).bfloat16())
        torch.testing.assert_close(many, few, atol=1e-6, rtol=1e-6)
        assert numbers.tolist() == [0, 1, 2, 3, 4] and numbers.dtype == torch.int64
        assert column.tolist() == [[0], [0], [0]] and column.dtype == torch.int32
        assert flags.tolist() == [True, True, False]
        assert columns.tolist() == [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
        assert total.tolist() == [[3, 3], [3, 3]]


def _choices(rank: int, memory: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Call after call, of other rows each time, over memory that both processes see."""
    size = len(memory) // WORLD
    exchange = Exchange(memory, torch.tensor([0, size]), rank, 4, 2)
    make, found = Maker.seeded(), []
    for rows in (1, 4, 2, 3, 1, 4):
        inputs = argmax_inputs(make, rows, 70, 8)
        own = inputs["weight"][35 * rank : 35 * rank + 35].contiguous()
        chosen = linear_argmax(inputs["x"], own, exchange=exchange, impl="triton")
        found.append((chosen, linear_argmax(inputs["x"], inputs["weight"], impl="reference")))
    return found


@pytest.mark.skipif(not interpreting(), reason="one GPU cannot be two ranks; the interpreter shares memory of the CPU")
def test_two_ranks_choose_the_tokens_of_one_together(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["choices"]) == 6
        assert all(torch.equal(chosen, expected) for chosen, expected in found["choices"])


def test_heads_must_divide() -> None:
    said = "runtime.tensor_parallel=3 does not divide the target's num_heads: expected a multiple of 3, got 4"
    with pytest.raises(ValueError, match=said):
        parallel_config(toy.CONFIG, 3)


LENGTHS = torch.tensor([4, 7])
OTHERS = {"draft_probs": torch.ones(2, 2, 5), "path_probs": torch.full((2, 3), 0.5)}


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What rank 0 sends; its tensors are one more than this rank's."""
    sent: list[Any] = []
    monkeypatch.setattr(collectives, "parallel", lambda: True)
    monkeypatch.setattr(collectives, "from_rank_0", lambda given: sent.extend(given) or [each + 1 for each in given])
    return sent


def chain(nodes: int, **others: torch.Tensor) -> DraftTree:
    return DraftTree(torch.arange(2 * nodes).view(2, nodes), build_chain(LENGTHS, nodes, impl="reference"), **others)


@pytest.mark.parametrize("others", [{}, OTHERS, {"draft_rows": torch.zeros(2, 3).int()}], ids=["bare", "drawn", "rows"])
def test_the_draft_of_rank_0_is_taken_whole(sent: list[Any], others: dict[str, torch.Tensor]) -> None:
    own = chain(3, **others)
    agreed = collectives.agree_on_draft(own)
    assert torch.equal(agreed.tokens, own.tokens + 1)
    assert all(torch.equal(left, right + 1) for left, right in zip(agreed.links, own.links, strict=True))
    for name in ("draft_probs", "draft_rows", "path_probs"):
        before, after = getattr(own, name), getattr(agreed, name)
        assert (after is None) if before is None else torch.equal(after, before + 1)
    assert len(sent) == 6 + len(others)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_its_own_share(monkeypatch: pytest.MonkeyPatch, sent: list[Any], rank: int) -> None:
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collectives.dist, "get_rank", lambda: rank)
    whole = torch.arange(12).view(3, 4)
    assert torch.equal(collectives.own_share(whole, 1), whole[:, 2 * rank : 2 * rank + 2])
