"""How many launches a step of the tiny model is, counted without a GPU.

A launch is a kernel of this project, which `record_launches` collects as the chip would launch it, or an operation of
torch that runs on the device. Views and the allocation of tensors run nothing there. Each dispatched operation counts
once, the torch operation that a kernel of this project stands in for included.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from algorithms.algorithm import Algorithm
from algorithms.attention.backends.triton import TritonBackend
from algorithms.autoregressive import Autoregressive
from algorithms.dflash.drafting import DFlash
from algorithms.eagle.drafting import Eagle3
from algorithms.engine.engine import Engine
from algorithms.engine.settings import RuntimeSettings
from algorithms.models.loading import Target, load_target
from algorithms.step.sampling_params import SamplingNeeds
from algorithms.step.step import PHASES, Step
from specdec_kernels.launch import record_launches
from tests.algorithms.device_operations import DeviceOperations

TINY = "assets/tiny"
TARGET = load_target(f"{TINY}/target", "cpu", torch.bfloat16)


def engine_of(algorithm: Algorithm, prefill_chunk: int = 2048, target: Target = TARGET) -> Engine:
    """An engine for one request, with the fused forward and the launches of a GPU."""
    backend = TritonBackend(TritonBackend.Config(tile_schedule=True), "triton")
    settings = RuntimeSettings(max_batch=1, forward="fused", impl="triton", prefill_chunk=prefill_chunk)
    engine = Engine(target, algorithm, backend, settings, decode=lambda ids: "")
    engine.parts.resources.choose_forward(target.model)
    return engine


def launches_of(algorithm: Algorithm, needs: SamplingNeeds, target: Target = TARGET) -> dict[str, Counter[str]]:
    """What each phase of a step of one request launches, by name."""
    engine = engine_of(algorithm, target=target)
    engine.parts.state.active.fill_(1)
    step = Step(engine.parts, engine.parts.state.batch(0, 1, target.config.max_position_embeddings), needs)
    counted = {}
    for phase in PHASES:
        with torch.inference_mode(), record_launches("sm90") as launches, DeviceOperations() as operations:
            getattr(step, phase)()
        counted[phase] = Counter(launched.kernel.__name__ for launched in launches) + operations.names
    return counted


def eagle3(**options: int) -> Algorithm:
    return Eagle3(Eagle3.Config(**options), TARGET, f"{TINY}/eagle3")


@pytest.mark.parametrize(
    ("algorithm", "most"),
    [
        (lambda: Autoregressive(Autoregressive.Config(), TARGET, None), 80),
        (lambda: eagle3(steps=6, topk=10, num_nodes=32), 250),
        (lambda: eagle3(steps=3), 150),
        (lambda: DFlash(DFlash.Config(), TARGET, f"{TINY}/dflash"), 120),
    ],
    ids=["autoregressive", "eagle3_6_10_32", "eagle3_chain_3", "dflash"],
)
def test_launches_of_a_step(algorithm: Callable[[], Algorithm], most: int) -> None:
    """The fused forward, greedy. With the merge of split keys, because the context is the whole one."""
    counted = launches_of(algorithm(), SamplingNeeds())
    assert sum(sum(names.values()) for names in counted.values()) <= most, counted


def test_levels_are_planned_at_once() -> None:
    """Slots and plans of all levels of a tree or a chain are one launch each."""
    for algorithm in (eagle3(steps=6, topk=10, num_nodes=32), eagle3(steps=4)):
        drafted = launches_of(algorithm, SamplingNeeds())["draft"]
        assert drafted["_level_slots_kernel"] == drafted["_plan_kernel"] == 1, drafted
        assert drafted["_token_slots_kernel"] == 0 and drafted["_attention_kernel"] > 1, drafted


@pytest.mark.parametrize(
    ("algorithm", "most"),
    [
        (lambda: Autoregressive(Autoregressive.Config(), TARGET, None), 75),
        (lambda: eagle3(steps=3), 95),
        (lambda: DFlash(DFlash.Config(), TARGET, f"{TINY}/dflash"), 80),
    ],
    ids=["autoregressive", "eagle3_chain_3", "dflash"],
)
def test_launches_of_a_chunk(algorithm: Callable[[], Algorithm], most: int) -> None:
    """The entry of requests into the state, the target's forward and the drafter's observation, without a copy for each
    request."""
    engine = engine_of(algorithm(), prefill_chunk=32)
    assert [chunk.size for chunk in engine.prefiller.prefills] == [1]
    with torch.inference_mode(), record_launches("sm90") as launches, DeviceOperations() as operations:
        engine.prefiller.warm_up()
    counted = Counter(launched.kernel.__name__ for launched in launches) + operations.names
    assert counted.total() <= most, counted


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda target: Autoregressive(Autoregressive.Config(), target, None),
        lambda target: Eagle3(Eagle3.Config(steps=6, topk=10, num_nodes=32), target, f"{TINY}/eagle3"),
    ],
    ids=["one_node", "tree"],
)
def test_a_layer_is_ten_launches_at_most(algorithm: Callable[[Target], Algorithm]) -> None:
    """With the store of keys and the merge of split keys: what the verification of a target with a layer more launches
    besides."""
    counted = []
    for layers in (len(TARGET.model.model.layers), len(TARGET.model.model.layers) - 1):
        model = copy.deepcopy(TARGET.model)
        model.model.layers = model.model.layers[:layers]
        model.config = dataclasses.replace(TARGET.config, num_layers=layers)
        target = dataclasses.replace(TARGET, config=model.config, model=model)
        counted.append(launches_of(algorithm(target), SamplingNeeds(), target)["verify"])
    layer = counted[0] - counted[1]
    products = layer["_linear_kernel"] + layer["_linear_hopper_kernel"]
    assert layer["_merge_kernel"] == 1 and products == 4 and layer.total() <= 10, layer
