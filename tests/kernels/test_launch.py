"""A launch goes to the GPU that holds its tensors."""

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_kernels import launch as module
from specdec_kernels.launch import Launch, lanes, launch, record_launches
from specdec_kernels.tree import build_chain


class Gpus:
    """Stands for `torch.cuda`: the current device, how often it was asked for, and which devices were made current."""

    def __init__(self) -> None:
        self.current, self.asked, self.entered = 0, 0, []

    def current_device(self) -> int:
        self.asked += 1
        return self.current

    def device(self, index: int) -> Any:
        gpus = self

        class Guard:
            def __enter__(self) -> None:
                self.before, gpus.current = gpus.current, index
                gpus.entered.append(index)

            def __exit__(self, *error: object) -> None:
                gpus.current = self.before

        return Guard()


class OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    index = 0
    is_cuda = property(lambda self: True)

    def get_device(self) -> int:
        return self.index


class Kernel:
    """Notes the GPU that is current when it is launched."""

    def __init__(self, gpus: Gpus, error: Exception | None = None) -> None:
        self.launched_on: list[int] = []
        self._gpus, self._error = gpus, error

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **options: Any) -> None:
            self.launched_on.append(self._gpus.current)
            if self._error is not None:
                raise self._error

        return run


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    fake = Gpus()
    monkeypatch.setattr(module.torch.cuda, "current_device", fake.current_device)
    monkeypatch.setattr(module.torch.cuda, "device", fake.device)
    return fake


def on_gpu(index: int) -> torch.Tensor:
    tensor = torch.zeros(1).as_subclass(OnGpu)
    tensor.index = index
    return tensor


def test_a_launch_goes_to_the_gpu_of_its_tensors(gpus: Gpus) -> None:
    kernel = Kernel(gpus)
    launch(kernel, (1,), None, 7, on_gpu(1))
    assert kernel.launched_on == [1] and gpus.current == 0


def test_the_current_gpu_is_left_alone(gpus: Gpus) -> None:
    kernel = Kernel(gpus)
    launch(kernel, (1,), on_gpu(0))
    assert kernel.launched_on == [0] and gpus.entered == []


def test_a_failed_launch_gives_the_current_gpu_back(gpus: Gpus) -> None:
    with pytest.raises(RuntimeError, match="no such kernel image"):
        launch(Kernel(gpus, RuntimeError("no such kernel image")), (1,), on_gpu(1))
    assert gpus.current == 0


@pytest.mark.parametrize("args", [(torch.zeros(1),), (3, None)], ids=["cpu", "no tensors"])
def test_no_gpu_is_asked_for_without_gpu_tensors(gpus: Gpus, args: tuple[Any, ...]) -> None:
    kernel = Kernel(gpus)
    launch(kernel, (1,), *args)
    assert len(kernel.launched_on) == 1 and gpus.asked == 0 and gpus.entered == []


def test_recording_touches_no_gpu(gpus: Gpus) -> None:
    with record_launches("sm90") as launches:
        launch(Kernel(gpus), (1,), on_gpu(1))
    assert len(launches) == 1 and gpus.asked == 0 and gpus.entered == []


def test_a_chip_is_known_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {(8, 0): "sm80", (8, 9): "sm80", (9, 0): "sm90", (10, 0): "sm100", (12, 0): "sm100"}
    monkeypatch.setattr(module, "_chip_of", module._chip_of.__wrapped__)
    for capability, name in names.items():
        monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(module.torch.version, "hip", None)
        assert module.current_chip(on_gpu(0)) == name
    monkeypatch.setattr(module.torch.version, "hip", "6.2")
    assert module.current_chip(on_gpu(0)) == "gfx942"
    assert module.current_chip(torch.zeros(1)) == "interpreter"


def test_a_gpu_is_asked_for_its_capability_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(module, "_chip_of", cache(module._chip_of.__wrapped__))
    monkeypatch.setattr(module.torch.version, "hip", None)
    monkeypatch.setattr(module.torch.cuda, "get_device_capability", lambda gpu: (asked.append(gpu), (9, 0))[1])
    assert [module.current_chip(on_gpu(gpu)) for gpu in (0, 1, 0, 1)] == ["sm90"] * 4 and asked == [0, 1]


@pytest.mark.parametrize("chip, added", [("sm80", dict(PDL=False)), ("sm90", dict(PDL=True, launch_pdl=True))])
def test_a_kernel_with_a_parameter_for_it_depends_on_its_predecessor(chip: str, added: dict[str, Any]) -> None:
    class Dependent:
        arg_names = ("x", "PDL")

    with record_launches(chip) as launches:
        launch(Dependent(), (1,), torch.zeros(1), BLOCK=16)
    assert launches[0].constexprs == dict(BLOCK=16) | added


def test_every_dependent_kernel_waits() -> None:
    """`launch` lets a kernel with the parameter begin before its predecessor has ended."""
    folder, passing, count = Path(module.__file__).parent, [], 0
    for path in folder.rglob("*.py"):
        for kernel in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(kernel, ast.FunctionDef) and "PDL" in [argument.arg for argument in kernel.args.args]:
                called = {getattr(node.func, "id", "") for node in ast.walk(kernel) if isinstance(node, ast.Call)}
                count += 1
                if path.name != "pdl.py" and not called & {"wait_for_predecessor", "begin"}:
                    passing.append(kernel.name)
    assert count > 25 and not passing


def test_a_record_holds_what_the_launch_was_given(gpus: Gpus) -> None:
    kernel = Kernel(gpus)
    with record_launches("sm90") as launches:
        launch(kernel, (1,), 7, None, num_warps=8, num_stages=3, BLOCK=16)
    assert launches == [Launch(kernel, args=(7, None), constexprs=dict(BLOCK=16), num_warps=8, num_stages=3)]


@pytest.mark.gpu
def test_the_second_gpu_computes_what_it_holds() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, the test needs two")
    lengths = torch.tensor([5, 0, 9], device="cuda:1")
    with torch.cuda.device(0):
        links = build_chain(lengths, 4, impl="triton")
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0
    assert links.positions.device == lengths.device
    assert links.positions.cpu().equal(build_chain(lengths.cpu(), 4, impl="reference").positions)


@pytest.mark.gpu
def test_a_launch_is_captured_on_the_second_gpu() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one CUDA device, the test needs two")
    lengths = torch.tensor([5, 0, 9], device="cuda:1")
    with torch.cuda.device(1):
        build_chain(lengths, 4, impl="triton")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            links = build_chain(lengths, 4, impl="triton")
        lengths += 1
        graph.replay()
        torch.cuda.synchronize(1)
    assert links.positions[:, 0].tolist() == [6, 1, 10]


def test_lanes_are_the_next_power_of_two() -> None:
    assert [lanes(count) for count in (0, 1, 2, 3, 4, 5, 8, 9)] == [2, 2, 2, 4, 4, 8, 8, 16]
    assert [lanes(count, 8) for count in (5, 9, 100)] == [8, 8, 8]
