"""Wrong input to a public function is refused before anything runs, by the argument, what is expected and what it is.

A row holds what is changed in the function's inputs, and a pattern of the message.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import specdec_kernels as kernels
from specdec_kernels.all_reduce import all_reduce_add_rms_norm
from specdec_kernels.all_reduce.cases import exchange_inputs
from specdec_kernels.attention import AttentionShape, paged_attention, plan_attention
from specdec_kernels.attention.cases_inputs import attention_inputs, changed, plan_arguments
from specdec_kernels.cases import Maker
from specdec_kernels.clock import pass_border
from specdec_kernels.experts import Mxfp4, Routing, expert_mlp, route_experts, schedule_experts
from specdec_kernels.experts.cases import mlp_inputs
from specdec_kernels.kv_write.cases import materialize_inputs, write_inputs
from specdec_kernels.lattice.cases import factors_of, gru, make_lattice, rnn, sampled
from specdec_kernels.linear_attention import DeltaInputs, DeltaState, tree_masks
from specdec_kernels.linear_attention.cases import chunks, inputs_of, rule, tree
from specdec_kernels.mla import mla_attention
from specdec_kernels.mla.cases import mla_inputs
from specdec_kernels.norm.cases import add_inputs, embed_inputs, join_inputs
from specdec_kernels.projection.cases import linear_inputs, normed_inputs, scaled_inputs
from specdec_kernels.verify.cases import CASES

Inputs = dict[str, Any]
MAKE = Maker.seeded("cpu")
CHAIN = attention_inputs(MAKE, "chain", 3, (4, 9))
LATENT = mla_inputs(MAKE, "chain", 3, (5, 20))
SAMPLED, FACTORS = sampled(MAKE, 2, 3, 4), factors_of(MAKE, 2, 3, 4, 8, gating="token")
LATTICE: Inputs = {name: SAMPLED[name] for name in ("lattice", "pairs")}
SCALED, NORMED = scaled_inputs(MAKE, 3, 264, 300), normed_inputs(MAKE, 3, 47, 64)
EXPERTS, PACKED = mlp_inputs(MAKE, 3, 4, 2, 16, 8), mlp_inputs(MAKE, 3, 4, 2, 64, 32, packed=True)
DOWN, GATE_UP = PACKED["weights"].down, PACKED["weights"].gate_up
DELTA, STEP = inputs_of(MAKE, "chain", 2, 3), rule(MAKE, "chain", 2, 3)
TREE, CHUNKS = tree(MAKE, 2, 5), chunks(MAKE, (64,))
ZERO, TWO = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
TABLE, COUNTS = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
PAGES: Inputs = dict(page_table=TABLE, lengths=TWO, page_size=4)
STORE = kernels.HistoryStore.create(2, 1, 12, "cpu")
PICKED = kernels.SamplingTensors(torch.ones(2), seeds=torch.arange(2))
TIMES = torch.zeros(3, dtype=torch.int64)


def attention(**change: Any) -> Inputs:
    return changed(CHAIN, **change)


def latent(**change: Any) -> Inputs:
    return changed(LATENT, **change)


def with_down(**change: Any) -> Inputs:
    return PACKED | dict(weights=PACKED["weights"]._replace(down=DOWN._replace(**change)))


INPUTS: dict[Callable[..., Any], Inputs] = {
    paged_attention: CHAIN,
    plan_attention: plan_arguments(CHAIN),
    mla_attention: LATENT,
    kernels.add_rms_norm: add_inputs(MAKE, 5, 64),
    kernels.embed_rms_norm: embed_inputs(MAKE, 5),
    kernels.embed_join_rms_norm: join_inputs(MAKE, 2, 5),
    kernels.linear: linear_inputs(MAKE, 3, 48, 64),
    kernels.linear_silu_mul: {name: NORMED[name] for name in ("x", "weight")},
    kernels.linear_add_rms_norm: NORMED,
    kernels.linear_argmax: SCALED,
    kernels.write_kv: write_inputs(MAKE, tokens=5),
    kernels.materialize_kv: materialize_inputs(MAKE, tokens=5),
    route_experts: dict(logits=torch.zeros(2, 6)),
    schedule_experts: dict(experts=EXPERTS["routed"].experts, num_experts=4),
    expert_mlp: EXPERTS,
    kernels.greedy_chain: LATTICE,
    kernels.sample_chain: SAMPLED,
    kernels.lattice_tree: LATTICE,
    kernels.pair_scores: FACTORS,
    kernels.rnn_step: rnn(MAKE, 3, 8),
    kernels.gru_step: gru(MAKE, 3, 8, 12),
    kernels.delta_rule_inputs: DELTA,
    kernels.delta_rule: STEP,
    kernels.delta_rule_chunks: CHUNKS,
    kernels.delta_rule_tree: TREE,
    tree_masks: dict(slots=TREE["trees"].slots, parents=torch.zeros(2, 5, dtype=torch.int32)),
    kernels.accept: next(case for case in CASES if case.name == "accept_sampled").build(MAKE) | dict(impl="reference"),
    kernels.pick_tokens: dict(logits=torch.zeros(2, 5), positions=torch.arange(2), sampling=PICKED),
    kernels.build_tree: dict(lengths=TWO),
    kernels.merge_trees: dict(
        tokens=TABLE.long(), parents=TABLE, other_tokens=TABLE.long(), other_parents=TABLE
    ),
    kernels.token_slots: dict(page_table=TABLE, start=TWO, counts=COUNTS, width=3, page_size=4),
    kernels.flashinfer_indices: PAGES,
    kernels.flash_attention_table: PAGES,
    kernels.move_accepted: dict(page_table=TABLE, lengths=TWO, nodes=COUNTS[:, None]),
    kernels.match_histories: dict(
        store=STORE, history=ZERO.expand(1, 12).contiguous(), lengths=ZERO, slots=ZERO, num_nodes=4, max_ngram=3,
        order="latest",
    ),
    kernels.insert_histories: dict(store=STORE, history=torch.zeros(2, 12).long(), slots=TWO, start=TWO, width=4),
    kernels.HistoryStore.create: dict(slots=1, kept=1, context=9, device="cpu"),
    pass_border: dict(times=TIMES, place=0),
}  # fmt: skip
REFUSED: dict[Callable[..., Any], list[tuple[Inputs, str]]] = {
    paged_attention: [
        (attention(mode="causal"), "chain, block, tree"),
        (attention(q=torch.zeros(2, 3, 5, 16)), "multiple of kv's 2, got 5"),
        (attention(q=torch.zeros(2, 3, 4, 16).half()), "dtype torch.float16 or torch.float8_e4m3fn, got torch.float32"),
        (attention(lengths=torch.zeros(3).long()), r"lengths: expected shape \[2\], got \[3\]"),
        (attention(mask=torch.zeros(2, 3, 1).long()), "mask: expected with mode 'tree' only"),
        (dict(split_tokens=0), "split_tokens: expected at least 1, got 0"),
        (attention(depths=torch.zeros(2, 3).int()), "depths: expected with mode 'tree' and a window only"),
        (attention(soft_cap=-1.0), "soft_cap: expected a positive number, got -1.0"),
        (dict(v_scale=torch.ones(4)), r"v_scale: expected shape \[2\], got \[4\]"),
        (dict(tuning=dict(warps=4)), "tuning: expected fields among block_m, .*, got warps"),
        (dict(impl="cuda"), "impl: expected one of"),
        (dict(q=CHAIN["q"].double(), kv=CHAIN["kv"].double(), impl="triton"), "impl='reference'"),
        (attention(window=9) | dict(tile_schedule=plan_attention(**plan_arguments(CHAIN), impl="triton")),
         "window 9 in the call, None in the list"),
    ],
    plan_attention: [
        (dict(shape=AttentionShape.of(CHAIN["q"], CHAIN["kv"])._replace(heads=3)), "a multiple of kv_heads 2, got 3"),
    ],
    mla_attention: [
        (latent(mode="tree"), "mask: expected with mode 'tree' only, got mode 'tree' and NoneType"),
        (latent(q_rope=torch.zeros(2, 3, 4, 24)), "q_rope: expected a last dimension that is a multiple of 16, got 24"),
        (latent(cache=torch.zeros(9, 16, 40)), r"cache: expected shape \[\*, \*, 48\], got \[9, 16, 40\]"),
        (latent(cache=torch.zeros(9, 16, 48).half()), "cache: expected dtype torch.float32, got torch.float16"),
        (latent(scale=None), "scale: expected a positive number, got None"),
        (latent(window=3), "expected no window or soft_cap .* with latent attention, got window"),
    ],
    kernels.add_rms_norm: [
        (dict(x=torch.zeros(())), r"x: expected a last dimension from 1 to 32768, got shape \[\]"),
        (dict(x=torch.zeros(2, 0)), "x: expected a last dimension from 1"),
        (dict(weight=torch.ones(63)), r"weight: expected shape \[64\], got \[63\]"),
        (dict(weight=torch.ones(64).half()), "weight: expected dtype torch.float32, got torch.float16"),
        (dict(residual=torch.zeros(3, 64)), r"residual: expected shape \[5, 64\], got \[3, 64\]"),
        (dict(x=torch.zeros(64, 5).T), "x: expected a contiguous tensor"),
    ],
    kernels.embed_rms_norm: [
        (dict(tokens=torch.zeros(5).int()), "tokens: expected dtype torch.int64, got torch.int32"),
        (dict(table=torch.zeros(0, 64)), "table: expected at least one row"),
    ],
    kernels.embed_join_rms_norm: [
        (dict(feature=torch.zeros(2, 3, 64)), r"feature: expected shape \[2, 5, 64\], got \[2, 3, 64\]"),
        (dict(feature=torch.zeros(2, 5, 32)), r"feature: expected shape \[2, 5, 64\], got \[2, 5, 32\]"),
        (dict(feature_weight=torch.ones(64).half()), "feature_weight: expected dtype torch.float32"),
        (dict(sources=torch.zeros(2, 4).long()), r"sources: expected shape \[2, 5\], got \[2, 4\]"),
        (dict(sources=torch.zeros(2, 5).long(), feature=torch.zeros(2, 0, 64)), "feature: expected at least one"),
    ],
    kernels.silu_mul: [(dict(gate_up=torch.zeros(3, 7)), "gate_up: expected an even last dimension")],
    kernels.linear: [
        (dict(x=torch.zeros(3, 0)), "x: expected a last dimension of at least 1"),
        (dict(x=torch.zeros(3, 65)), r"weight: expected shape \[\*, 65\], got \[48, 64\]"),
        (dict(weight=torch.zeros(64, 48).T), "weight: expected a contiguous tensor"),
        (dict(bias=torch.zeros(47)), r"bias: expected shape \[48\], got \[47\]"),
        (dict(x=torch.zeros(3, 64).int()), "x: expected dtype"),
        *(
            (dict(x=SCALED["x"], weight=SCALED["weight"]._replace(**change)), f"weight.{message}")
            for change, message in (
                (dict(group_rows=3), "group_rows: expected a power of two up to 128, got 3"),
                (dict(group_inner=64), "group_inner: expected 128, or 300 with group_rows=1, got 64"),
                (dict(scales=torch.ones(2, 3)), r"scales: expected shape \[3, 3\], got \[2, 3\]"),
                (dict(codes=torch.zeros(264, 300)), "codes: expected dtype torch.uint8"),
            )
        ),
    ],
    kernels.linear_argmax: [({}, "got a ScaledWeight, which this product does not take")],
    kernels.linear_silu_mul: [({}, "weight: expected an even number of rows, got 47")],
    kernels.linear_add_rms_norm: [
        (dict(residual=torch.zeros(2, 47)), r"residual: expected shape \[3, 47\], got \[2, 47\]"),
        (dict(norm_weight=torch.zeros(48)), r"norm_weight: expected shape \[47\], got \[48\]"),
    ],
    all_reduce_add_rms_norm: [
        (exchange_inputs(MAKE, 1, 64, capacity=3), "exchange.rows: expected an even number, got 3"),
    ],
    kernels.write_kv: [
        (dict(kv=torch.zeros(2, 3, 16, 2, 32)), r"kv: expected shape \[2, \*, \*, 2, 16\]"),
        (dict(slots=torch.zeros(5).int()), "slots: expected dtype torch.int64, got torch.int32"),
        (dict(rope=torch.zeros(64, 18)), "rope: expected an even number of columns from 2 to 16, got 18"),
        (dict(k_scale=torch.ones(3)), r"k_scale: expected shape \[2\], got \[3\]"),
        (dict(q_norm=None), "both or neither"),
        (dict(q=torch.zeros(16, 4, 5).permute(2, 1, 0)), "q: expected adjacent heads"),
        (dict(q=torch.zeros(5, 72)[:, 1:65].view(5, 4, 16)), "q: expected adjacent heads"),
    ],
    kernels.materialize_kv: [
        (dict(kv=torch.zeros(2, 2, 3, 16, 2, 16)), r"kv: expected shape \[3, 2, \*, \*, 2, 16\]"),
        (dict(k_norm=torch.zeros(16)), r"k_norm: expected shape \[3, 16\], got \[16\]"),
    ],
    route_experts: [
        (dict(routing=Routing(2, "relu")), "scoring: expected one of softmax, sigmoid, .*, got 'relu'"),
        (dict(routing=Routing(7)), "routing.topk: expected 1 to 6, got 7"),
        (dict(routing=Routing(2, groups=4)), "routing.groups: expected a divisor of 6 experts, got 4"),
        (dict(routing=Routing(2, groups=2, topk_groups=3)), "routing.topk_groups: expected 1 to 2, got 3"),
        (dict(routing=Routing(3, groups=3)), "routing.topk: expected 1 to 2, got 3"),
        (dict(routing=Routing(2, groups=2, group_score="two_best")), "group_score: .* got softmax and groups of 3"),
        (dict(routing=Routing(2), correction_bias=torch.zeros(6)), "bias: expected sigmoid scores with it"),
    ],
    schedule_experts: [(dict(row_tile=24), "row_tile: expected a power of two of at least 16, got 24")],
    expert_mlp: [
        (dict(weights=EXPERTS["weights"]._replace(down=torch.zeros(4, 8, 16))), r"down: expected shape \[4, 16, 8\]"),
        (dict(schedule=schedule_experts(EXPERTS["routed"].experts, 5, 16)), "expected 4 experts as .* have, got 5"),
        (with_down(codes=DOWN.codes.int()), "down.codes: expected dtype torch.uint8, got torch.int32"),
        (with_down(scales=DOWN.scales[..., :1].contiguous()), r"down.scales: expected shape \[4, 64, 16\]"),
        (with_down(codes=DOWN.codes[..., 1:]), r"down.codes: expected shape \[4, 64, 16\]"),
        (PACKED | dict(x=torch.zeros(3, 48), weights=PACKED["weights"]._replace(
            gate_up=Mxfp4(GATE_UP.codes[..., :24].contiguous(), GATE_UP.scales))),
         "gate_up: expected a multiple of 32 columns for MXFP4, got 48"),
    ],
    kernels.greedy_chain: [
        (dict(pairs=torch.zeros(2, 3, 4, 5)), r"pairs: expected shape \[2, 3, 4, 4\], got \[2, 3, 4, 5\]"),
        (dict(lattice=make_lattice(MAKE, 1, 2, 33)), "C of tokens: expected 1 to 32, got 33"),
        (dict(lattice=make_lattice(MAKE, 1, 33, 2)), "D of tokens: expected 1 to 32, got 33"),
        (dict(lattice=SAMPLED["lattice"]._replace(counts=TWO)), "counts: expected dtype torch.int32, got torch.int64"),
    ],
    kernels.sample_chain: [(dict(positions=None), "expected seeds and positions, or uniforms; got neither")],
    kernels.lattice_tree: [(dict(num_nodes=0), "num_nodes: expected 1")],
    kernels.pair_scores: [
        (dict(factors=FACTORS["factors"]._replace(gates=None)), "token_gates: expected gates with them, got None"),
        (dict(factors=FACTORS["factors"]._replace(gates=FACTORS["factors"].gates.half())), "gates: expected dtype"),
    ],
    kernels.rnn_step: [
        (dict(weight=torch.zeros(24, 8)), r"weight: expected shape \[24, 16\], got \[24, 8\]"),
        (dict(weight=torch.zeros(16, 24).T), "weight: expected stride 1 in the last dimension"),
    ],
    kernels.gru_step: [
        (dict(weight_ih=torch.zeros(24, 8)), r"weight_ih: expected shape \[24, 12\], got \[24, 8\]"),
    ],
    kernels.delta_rule_inputs: [
        (dict(a=torch.zeros(6, 3)), r"a: expected shape \[6, 4\], got \[6, 3\]"),
        (dict(qkv=torch.zeros(6, 79), state=DeltaState(DELTA["state"].ssm, torch.zeros(5, 3, 79))), "expected 2 H"),
    ],
    kernels.delta_rule: [
        (dict(state=STEP["state"]._replace(ssm=STEP["state"].ssm.half())), "ssm: expected dtype torch.float32, got"),
        (dict(paths=STEP["paths"]._replace(owners=None)), "owners: expected the path that writes each row, got None"),
        (dict(state=STEP["state"]._replace(conv=torch.zeros(5, 0, 80))), "taps of state.conv: expected 2 to 8, got 1"),
    ],
    kernels.delta_rule_chunks: [
        (dict(inputs=DeltaInputs(*(each[:60] for each in CHUNKS["inputs"]))), "expected a multiple of 64 rows, got 60"),
    ],
    kernels.delta_rule_tree: [
        (dict(trees=TREE["trees"]._replace(mask=torch.zeros(2, 65, 1).long())), "of mask: expected 1 to 64, got 65"),
        (dict(trees=TREE["trees"]._replace(mask=TREE["trees"].mask[:, :4].contiguous())),
         r"inputs: expected 2 \* 4 rows, got 10"),
    ],
    tree_masks: [(dict(mask=torch.zeros(2, 5, 2).long()), "mask: expected shape")],
    kernels.gated_rms_norm: [
        (dict(x=torch.zeros(2, 2, 6), gate=torch.zeros(2, 6), weight=torch.ones(6), eps=1e-6),
         r"gate: expected shape \[2, 12\], got \[2, 6\]"),
    ],
    kernels.accept: [
        (dict(rule="greedy"), "rule 'greedy' samples nothing"),
        (dict(sampling=kernels.SamplingTensors(torch.ones(7))), "expected seeds and positions, or uniforms"),
        (dict(rule="block"), "rule 'block': expected draft_probs, got None"),
        (dict(draft_probs=torch.zeros(7, 5, 100)), "rule 'target_only' ignores the draft's distribution"),
        (dict(rule="rejection", draft_probs=torch.zeros(7, 6, 100)), r"draft_probs: expected shape \[7, 5, 100\]"),
        (dict(rule="block", draft_probs=torch.zeros(7, 5, 100), uniforms=torch.zeros(7, 6)), r"\[7, 7\], got"),
        (dict(probs=torch.zeros(7, 6, 100)), "either logits or probs, got both"),
        (dict(logits=None, probs=torch.ones(7, 6, 9), sampling=kernels.SamplingTensors(top_p=torch.ones(7))),
         "no top_k, top_p or min_p"),
    ],
    kernels.pick_tokens: [
        (dict(logits=torch.zeros(2, 0)), "vocabulary of logits: expected at least 1"),
        (dict(logits=torch.zeros(5, 2).t()), "logits: expected stride 1"),
        (dict(sampling=PICKED._replace(seeds=None)), "expected seeds and positions, or uniforms"),
        (dict(sampling=PICKED._replace(min_p=torch.ones(4)[::2])), "min_p: expected a contiguous tensor"),
        (dict(stream=-1), "stream: expected at least 0"),
    ],
    kernels.build_tree: [
        (dict(parents=torch.zeros(2, 0).int()), "at least one node"),
        (dict(parents=torch.zeros(2, 257).int()), "to 256 nodes, got 257"),
    ],
    kernels.merge_trees: [
        (dict(other_tokens=TABLE), "other_tokens: expected dtype torch.int64, got torch.int32"),
        (dict(other_parents=TABLE[:, :2].contiguous()), r"other_parents: expected shape \[2, 3\], got \[2, 2\]"),
    ],
    kernels.token_slots: [
        (dict(counts=TWO), "counts: expected dtype torch.int32"),
        (dict(width=-1), "width: expected at least 0"),
    ],
    kernels.flashinfer_indices: [(dict(page_size=0), "page_size: expected at least 1, got 0")],
    kernels.flash_attention_table: [
        (dict(page_table=torch.zeros(3, 2).int().t()), "page_table: expected a contiguous tensor"),
    ],
    kernels.move_accepted: [
        (dict(kv=torch.zeros(1, 3, 2, 2, 1, 1)), r"kv: expected shape \[\*, 2, \*, \*, \*, \*\]"),
    ],
    kernels.match_histories: [
        (dict(max_ngram=64), "max_ngram: expected 1 to 63, got 64"),
        (dict(order="lru"), "order: expected one of latest, frequent, got 'lru'"),
        (dict(lengths=TWO), r"lengths: expected shape \[1\], got \[2\]"),
        (dict(history=torch.zeros(12, 2).long().t()[:1]), "history: expected stride 1"),
    ],
    kernels.insert_histories: [(dict(counts=TWO), "counts: expected dtype torch.int32")],
    kernels.HistoryStore.create: [
        (dict(slots=0, kept=4), "got 0 slots, 4 kept histories and 0 of a corpus"),
        (dict(slots=60000, kept=6000), "65536 histories at most, got 60000 slots"),
        (dict(context=1 << 24), "context: expected 1 to 16777215, got 16777216"),
    ],
    pass_border: [
        (dict(place=3), "place: expected 0 to 2, got 3"),
        (dict(times=torch.zeros(3)), "expected a contiguous .* int64, got .*float32"),
        (dict(times=TIMES.expand(2, 3).contiguous()), r"expected a contiguous .* got \[2, 3\]"),
    ],
}  # fmt: skip
ROWS = [
    pytest.param(function, INPUTS.get(function, {}) | change, message, id=f"{function.__name__}: {message[:60]}")
    for function, rows in REFUSED.items()
    for change, message in rows
]


@pytest.mark.parametrize("function, inputs, message", ROWS)
def test_wrong_input_is_named(function: Callable[..., Any], inputs: Inputs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        function(**inputs)
