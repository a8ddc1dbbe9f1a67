"""Settings out of range, or that do not go together, are refused where they are made, by the key, what is expected and
what it is."""

from collections.abc import Callable
from functools import partial

import pytest

from algorithms.attention.backends import backends
from algorithms.drafting.draft_sampling import DraftSampling, TreeShape
from algorithms.engine.settings import RuntimeSettings
from algorithms.frontend import load_target
from algorithms.lookup import Suffix
from algorithms.mixed import Mixed
from algorithms.mtp.config import MTPConfig
from algorithms.mtp.drafting import MTP
from algorithms.synthetic import Synthetic
from tests.algorithms.drafters import TARGET
from tests.algorithms.tiny_folders import small_config

hybrid, fa4, flashinfer = (backends()[name].Config for name in ("hybrid", "fa4", "flashinfer"))


def synthetic(**settings: object) -> Synthetic:
    return Synthetic(Synthetic.Config(**settings), TARGET, None)  # type: ignore[arg-type]


def mixed(**first_or_second: dict[str, object]) -> Mixed:
    return Mixed(Mixed.Config(**first_or_second), TARGET, "random")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(Suffix.Config, num_nodes=1), "algo.num_nodes: expected 2 to 256, got 1"),
        (partial(Suffix.Config, max_ngram=64), "algo.max_ngram: expected 1 to 63, got 64"),
        (partial(Suffix.Config, max_candidates=0), "algo.max_candidates: expected 1 to 64, got 0"),
        (partial(Suffix.Config, histories=-1), "algo.histories: expected 0 to 4096, got -1"),
        (partial(Suffix.Config, min_path_prob=1.5), "algo.min_path_prob: expected 0 to 1, got 1.5"),
        (partial(Suffix.Config, corpus="file", shared=False), "algo.corpus: expected algo.shared=true with it"),
        (partial(synthetic, rate=[]), "algo.rate: expected at least one rate"),
        (partial(synthetic, rate=[0.5, 1.5]), r"algo.rate\[1\]: expected .*1.5"),
        (partial(synthetic, rate=[0.5], drafter={"name": "synthetic"}), "algo.drafter: algorithm: expected one of"),
        (partial(mixed, first={"name": "sufix"}), "algo.first: algorithm: expected one of .*suffix.*, got 'sufix'"),
        (partial(mixed, second={"name": "mixed"}), "algo.second: algorithm: expected one of .*, got 'mixed'"),
        (partial(mixed, first={"name": "suffix", "nodes": 3}), "suffix: 'nodes' is no setting; .* one of num_nodes"),
        (partial(mixed, first={"name": "suffix", "max_ngram": 99}), "first: algo.max_ngram: .* 1 to 63, got 99"),
        (partial(mixed, first={"name": "standalone", "rule": "block"}), "got algo=standalone with rule block"),
        (partial(MTP.Config, hidden_in="plain"), "algo.hidden_in: expected one of raw, normed, got 'plain'"),
        (partial(MTPConfig, small_config(), feedback="raw"), "feedback=raw: expected one MTP layer"),
        (partial(MTPConfig, small_config(num_layers=1), first="both"), "first: expected one of embedding, hidden"),
        (
            partial(DraftSampling.of, "gumbel", None, True),
            "draft_sampling: .* of topk, without_replacement, sample, got",
        ),
        (partial(DraftSampling.of, None, "greedy", True), "rule: .* target_only, block, rejection for a chain, got"),
        (
            partial(DraftSampling.of, "without_replacement", None, True),
            "siblings: expected algo.topk above 1, got a ch",
        ),
        (partial(DraftSampling.of, "topk", "block", True), "target_only for a chain with .*=topk, got 'block'"),
        (partial(DraftSampling.of, "without_replacement", "k_seq", False), "=without_replacement, got 'k_seq'"),
        (partial(TreeShape.of, 0, 1, None), "algo.steps: expected at least 1, got 0"),
        (partial(TreeShape.of, 0, 0, None), "algo.steps: expected at least 1, got 0"),
        (partial(TreeShape.of, 2, 0, None), "algo.topk: expected 1 to 64, got 0"),
        (partial(TreeShape.of, 2, 65, 8), "algo.topk: expected 1 to 64, got 65"),
        (partial(TreeShape.of, 2, 2, 1), "2 steps with topk 2 draft 2 to 7 nodes, node 0 included, got 1"),
        (partial(TreeShape.of, 2, 2, 8), "2 steps with topk 2 draft 2 to 7 nodes, node 0 included, got 8"),
        (partial(TreeShape.of, 9, 10, 257), "9 steps with topk 10 draft 2 to 256 nodes, node 0 included, got 257"),
        (partial(RuntimeSettings, prefill_chunk=0), "prefill_chunk: expected at least 1, got 0"),
        (partial(RuntimeSettings, prefill_ahead=-1), "prefill_ahead: expected at least 0 or null, got -1$"),
        (partial(RuntimeSettings, weight_dtype="int4"), "dtype: expected one of auto, fp8, fp8_w8a16, got 'int4'"),
        (partial(RuntimeSettings, weight_dtype="fp8", tensor_parallel=2), "fp8.*expected .*tensor_parallel=1, got 2"),
        (partial(load_target, "none", "cpu", weight_dtype="fp4"), "one of auto, fp8, fp8_w8a16, got 'fp4'"),
        (partial(hybrid, prefill="fa5"), "backend.prefill: expected one of fa4, flashinfer, torch, got 'fa5'"),
        (partial(hybrid, decode="hybrid"), "backend.decode: expected one of fa4, flashinfer, torch, got 'hybrid'"),
        (partial(hybrid, verify="draft"), "backend.verify: expected one of prefill, decode, got 'draft'"),
        (partial(hybrid, draft="torch"), "backend.draft: expected one of prefill, decode, got 'torch'"),
        (partial(fa4, dispatch="fa3"), "backend.dispatch: expected one of triton, auto, flash_attention_4, got 'fa3'"),
        (partial(fa4, split_tokens=8), "backend.split_tokens: expected at least 16 or null, got 8"),
        (partial(flashinfer, kernel="fa1"), "backend.kernel: expected one of auto, fa2, fa3, got 'fa1'"),
        (partial(flashinfer, workspace_mb=0), "backend.workspace_mb: expected at least 1, got 0"),
        (partial(small_config, sliding_windows=(4, None)), "sliding_windows: expected 4 entries, got 2"),
        (partial(small_config, sliding_windows=(None, 4, 0, 4)), r"_windows\[2\]: expected above 0 or null, got 0"),
        (partial(small_config, soft_cap=0.0), "soft_cap: expected above 0 or null, got 0.0"),
        (partial(small_config, scale=-1.0), "scale: expected above 0 or null, got -1.0"),
    ],
)
@pytest.mark.usefixtures("random_drafters")
def test_a_wrong_setting_is_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
