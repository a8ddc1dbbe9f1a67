"""Gated delta rule: the layer of transformers, and the same bits for any way to run through a text."""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from specdec_kernels.attention import mask_paths
from specdec_kernels.cases import Maker
from specdec_kernels.linear_attention import (
    CHUNK,
    DeltaInputs,
    DeltaState,
    DeltaWeights,
    Paths,
    RowLinks,
    accepted_paths,
    chain_paths,
    chunk_paths,
    commit_delta_rule,
    delta_rule,
    delta_rule_chunks,
    delta_rule_inputs,
    delta_rule_tree,
    gated_rms_norm,
    prompt_paths,
    tree_masks,
    tree_paths,
)
from specdec_kernels.linear_attention.cases import channels_of, make_state, make_weights, rule, tree
from specdec_kernels.tree import tree_parents

if torch.cuda.is_available():
    pytest.skip("these run on the CPU, where reference and interpreter can be compared", allow_module_level=True)

HEADS, SLOTS, LENGTH = (1, 2, 4, 6), 4, 23
# Node 2 has two children, and nodes 1 and 5 are leaves.
TREE = [[0, -1, -1, -1], [0, 1, -1, -1], [0, 2, -1, -1], [0, 2, 3, -1], [0, 2, 4, -1], [0, 2, 4, 5]]
Rows = tuple[Tensor, Tensor, Tensor]


class Runner:
    """One layer with slots of old requests, and texts as rows of raw inputs."""

    def __init__(self, impl: str) -> None:
        make = Maker.seeded(seed=3)
        self.impl, self.make, self.weights = impl, make, make_weights(make, HEADS)
        self.state = make_state(make, HEADS, SLOTS)

    def text(self) -> Rows:
        return tuple(self.make.normal(LENGTH, width) for width in (channels_of(HEADS), HEADS[1], HEADS[1]))

    def forward(self, rows: Rows, links: RowLinks, paths: Paths) -> tuple[Tensor, DeltaInputs]:
        inputs = delta_rule_inputs(*rows, self.weights, self.state, links, impl=self.impl)
        return delta_rule(inputs, paths, self.state, impl=self.impl), inputs

    def prompts(
        self, texts: list[Rows], slots: Tensor, starts: list[int], counts: list[int], tile: int
    ) -> list[Tensor]:
        """Run a segment of each text in tiles; returns the outputs of its tokens."""
        sizes = [max(1, -(-count // tile)) * tile for count in counts]
        firsts = [sum(sizes[:index]) for index in range(len(sizes))]
        rows = tuple(self.make.normal(sum(sizes), each.shape[1]) for each in texts[0])
        for text, first, start, count in zip(texts, firsts, starts, counts, strict=True):
            for part, whole in zip(rows, text, strict=True):
                part[first : first + count] = whole[start : start + count]
        numbers = (torch.tensor(starts), torch.tensor(counts, dtype=torch.int32), torch.tensor(firsts))
        out, _ = self.forward(rows, *prompt_paths(slots, *numbers, sum(sizes)))
        return [out[first : first + count] for first, count in zip(firsts, counts, strict=True)]

    def step(
        self, texts: list[Rows], slots: Tensor, starts: list[int], nodes: list[list[int]], drafts: int
    ) -> list[Tensor]:
        """Verify and commit: the accepted `nodes` of request b carry its text from `starts[b]` on, and the others
        something else. Returns the outputs of the accepted nodes. `drafts` is N of a chain; 0: the tree."""
        num_nodes = drafts or len(TREE)
        rows = tuple(self.make.normal(len(texts) * num_nodes, each.shape[1]) for each in texts[0])
        for request, (text, start, path) in enumerate(zip(texts, starts, nodes, strict=True)):
            at = [request * num_nodes + node for node in path]
            for part, whole in zip(rows, text, strict=True):
                part[at] = whole[start : start + len(path)]
        plan = chain_paths(slots, drafts) if drafts else tree_paths(slots, torch.tensor([TREE] * len(texts)).int())
        out, inputs = self.forward(rows, *plan)
        longest = max(map(len, nodes)) + 1
        padded = torch.tensor([path + [-1] * (longest - len(path)) for path in nodes], dtype=torch.int32)
        layers = DeltaInputs(*(each[None] for each in inputs)), DeltaState(*(each[None] for each in self.state))
        commit_delta_rule(layers[0], accepted_paths(slots, padded, num_nodes), layers[1], impl=self.impl)
        return [out[[request * num_nodes + node for node in path]] for request, path in enumerate(nodes)]


def one_by_one(runner: Runner, text: Rows, slot: int) -> Tensor:
    """Every row in a step of its own, in a slot that an old request has left."""
    slots = torch.tensor([slot])
    runner.prompts([text], slots, [0], [0], 4)
    return torch.cat([runner.step([text], slots, [at], [[0]], 1)[0] for at in range(LENGTH)])


def with_drafts(runner: Runner, texts: list[Rows], slots: Tensor) -> list[Tensor]:
    """Two requests: prompts in segments that end anywhere, chains and trees of which any part is accepted, none too."""
    parts = [
        runner.prompts(texts, slots, [0, 0], [7, 1], 4),
        runner.prompts(texts, slots, [7, 1], [2, 8], 8),
        runner.step(texts, slots, [9, 9], [[0, 1, 2], [0]], 4),
        runner.step(texts, slots, [12, 10], [[0, 2, 4, 5], [0, 1]], 0),
        runner.step(texts, slots, [16, 12], [[], [0, 2, 3]], 0),
        runner.step(texts, slots, [16, 15], [[0, 1, 2], [0, 1, 2, 3, 4]], 5),
        runner.step(texts, slots, [19, 20], [[0, 1, 2, 3], [0, 1, 2]], 5),
    ]
    return [torch.cat([part[request] for part in parts]) for request in range(2)]


def test_any_way_through_a_text_has_the_same_bits(impl: str) -> None:
    """Outputs and states with drafts have the bits of those without, other slots included."""
    plain, drafted = Runner(impl), Runner(impl)
    texts, slots = [plain.text(), plain.text()], torch.tensor([2, 0])
    drafted.state.ssm[slots] += 1  # old requests leave other states
    expected = [one_by_one(plain, text, slot) for text, slot in zip(texts, slots.tolist(), strict=True)]
    outputs = with_drafts(drafted, texts, slots)
    for found, wanted in zip([*outputs, *drafted.state], [*expected, *plain.state], strict=True):
        assert torch.equal(found, wanted)


def by_chunks(runner: Runner, text: Rows, slot: int, cuts: list[int]) -> Tensor:
    """A text as segments that end at `cuts`, each with its whole chunks first."""
    slots, found = torch.tensor([slot]), []
    for start, end in zip([0, *cuts[:-1]], cuts, strict=True):
        count, num_rows = end - start, max(1, -(-(end - start) // CHUNK)) * CHUNK
        rows = tuple(runner.make.normal(num_rows, each.shape[1]) for each in text)
        for part, whole in zip(rows, text, strict=True):
            part[:count] = whole[start:end]
        numbers = torch.tensor([start]), torch.tensor([count], dtype=torch.int32), torch.tensor([0])
        links, chunks, rest = chunk_paths(slots, *numbers, num_rows)
        inputs = delta_rule_inputs(*rows, runner.weights, runner.state, links, impl=runner.impl)
        done = delta_rule_chunks(inputs, chunks, runner.state, impl=runner.impl)
        found.append(delta_rule(inputs, rest, runner.state, out=done, impl=runner.impl)[:count])
    return torch.cat(found)


@pytest.mark.parametrize("length", [40, 64, 149, 192])
def test_chunks_are_the_recurrence_whatever_the_segments(impl: str, length: int) -> None:
    """Outputs and states are the recurrence's up to roundings, and their bits do not depend on where segments end."""
    runners = [Runner(impl) for _ in range(3)]
    text = tuple(runners[0].make.normal(length, width) for width in (channels_of(HEADS), HEADS[1], HEADS[1]))
    whole = by_chunks(runners[0], text, 2, [length])
    cuts = [*range(CHUNK, length, CHUNK), length]
    split = by_chunks(runners[1], text, 2, cuts)
    (plain,) = runners[2].prompts([text], torch.tensor([2]), [0], [length], CHUNK)
    assert torch.equal(whole, split)
    assert all(torch.equal(*pair) for pair in zip(runners[0].state, runners[1].state, strict=True))
    torch.testing.assert_close(whole, plain, rtol=1e-5, atol=1e-5)
    for found, expected in zip(runners[0].state, runners[2].state, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["random", "unused", "chain", "star"])
def test_a_tree_at_once_is_its_paths(impl: str, shape: str) -> None:
    """The links and outputs of a tree at once are those of its paths, one after another, and nothing is written."""
    given = tree(Maker.seeded(), 4, 21, shape)
    inputs, trees, state = given["inputs"], given["trees"], given["state"]
    before = [each.clone() for each in state]
    links, paths = tree_paths(trees.slots, mask_paths(trees.mask, 21, impl="reference"))
    parents = tree_parents(trees.mask, impl="reference")
    assert all(torch.equal(*pair) for pair in zip(links, tree_masks(trees.slots, parents, trees.mask)[0], strict=True))
    found, expected = delta_rule_tree(**given, impl=impl), delta_rule(inputs, paths, state, impl=impl)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(*pair) for pair in zip(before, state, strict=True))


def test_the_layer_of_transformers(impl: str) -> None:
    """From raw inputs to the gated norm, over several chunks of 64 of their chunked form."""
    groups, values, dk, dv, length = 2, 4, 8, 12, 150
    config = Qwen3_5TextConfig(
        hidden_size=16, num_hidden_layers=1, linear_num_key_heads=groups, linear_num_value_heads=values,
        linear_key_head_dim=dk, linear_value_head_dim=dv, rms_norm_eps=1e-4, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(5)
    theirs = Qwen3_5GatedDeltaNet(config, 0).eval()
    with torch.no_grad():
        theirs.dt_bias.normal_()
        theirs.norm.weight.normal_()
    theirs.out_proj = torch.nn.Identity()
    hidden = torch.randn(length, 16)
    with torch.no_grad():
        expected = theirs(hidden[None])[0]
        qkv, b, a, z = (getattr(theirs, f"in_proj_{name}")(hidden) for name in ("qkv", "b", "a", "z"))
    weights = DeltaWeights(theirs.conv1d.weight[:, 0].detach(), theirs.A_log.detach(), theirs.dt_bias.detach())
    state = make_state(Maker.seeded(), (groups, values, dk, dv), 1)
    one, zero = torch.tensor([length], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    links, paths = prompt_paths(zero, zero, one, zero, length)
    inputs = delta_rule_inputs(qkv, b, a, weights, state, links, impl=impl)
    out = delta_rule(inputs, paths, state, impl=impl)
    out = gated_rms_norm(out, z, theirs.norm.weight.detach(), 1e-4, impl=impl)
    torch.testing.assert_close(out.flatten(1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_path_without_nodes_and_padding_write_nothing(impl: str, count: int) -> None:
    inputs = rule(Maker.seeded(), "chain", 3, 2)
    slots, before = torch.tensor([4, -1, 2]), [each.clone() for each in inputs["state"]]
    paths = accepted_paths(slots, torch.tensor([[-1, -1], [0, 1], [0, -1]]).int()[:, :count].contiguous(), 2)
    lead = (
        DeltaInputs(*(each[None] for each in inputs["inputs"])),
        DeltaState(*(each[None] for each in inputs["state"])),
    )
    commit_delta_rule(lead[0], paths, lead[1], impl=impl)
    for each, old in zip(inputs["state"], before, strict=True):
        changed = (each != old).flatten(1).any(1)
        assert changed.tolist() == [False, False, count > 0, False, False, False]
