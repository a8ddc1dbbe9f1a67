"""The settings of a run, `runtime.…` on the command line: declared here alone. No torch is imported."""

from dataclasses import dataclass
from typing import Annotated

from algorithms.checked import Between, Checked

LARGEST_INT32 = 2**31 - 1
WEIGHT_DTYPES = ("auto", "fp8", "fp8_w8a16")
LAST_CAPTURED = {"none": None, "draft": "draft", "verify": "verify", "step": "commit"}
"""Level of capture in CUDA graphs to the last phase that is captured, as all before it are."""
GRAPH_LEVELS = tuple(LAST_CAPTURED)


@dataclass
class RuntimeSettings(Checked):
    """Device, sizes and switches of a run. The engine settles what is `auto`."""

    GROUP = "runtime."
    device: Annotated[str, ("auto", "cpu", "cuda")] = "auto"
    """cpu or cuda; auto is cuda where a GPU is visible."""
    dtype: Annotated[str, ("auto", "float32", "float16", "bfloat16")] = "auto"
    """float32, float16 or bfloat16, of weights and activations; auto: bfloat16 on a GPU, float32 elsewhere."""
    weight_dtype: Annotated[str, WEIGHT_DTYPES] = "auto"
    """Dtype of the weights of the projections of target and drafters: auto, which is as they are stored, or fp8, which
    quantises them as they are loaded, in blocks of 128 x 128. Activations of float8 weights are rounded to float8 too
    (W8A8); fp8_w8a16 leaves them."""
    impl: Annotated[str, ("auto", "triton", "reference")] = "auto"
    """triton or reference. Triton kernels are compiled on a GPU and run in Triton's interpreter elsewhere."""
    forward: Annotated[str, ("auto", "fused", "torch")] = "auto"
    """Computation outside of attention: fused kernels, or torch; auto is fused in half precision on a GPU."""
    page_size: Annotated[int, Between(1)] = 16
    """Tokens of a KV page."""
    max_batch: Annotated[int, Between(1)] = 4
    """Requests that run at a time."""
    num_pages: Annotated[int | None, Between(1, LARGEST_INT32)] = None
    """Pages of the KV pool; null takes what `max_batch` requests of `max_length` tokens need."""
    max_length: Annotated[int | None, Between(2)] = None
    """Bound on prompt and new tokens of a request together; null takes the length of the longest request."""
    graph: Annotated[str, ("auto", *GRAPH_LEVELS)] = "auto"
    """What CUDA graphs capture of a step: none, draft, verify (draft and verify) or step; auto: all, on a GPU."""
    async_steps: Annotated[int | None, Between(0)] = None
    """Maximum number of steps in flight while the host reads an earlier one; null takes 1 on a GPU, 0 elsewhere."""
    tensor_parallel: Annotated[int, Between(1)] = 1
    """Processes that share the target."""
    prefill_chunk: Annotated[int, Between(1)] = 2048
    """Bound on the prompt tokens of one prefill batch."""
    prefill_tile: Annotated[int | None, Between(1)] = None
    """Tokens of a tile of a prefill batch; null takes a width that suits the device."""
    mixed_prefill: bool = True
    """Prefill prompts in captured decode steps, where requests run."""
    prefill_ahead: Annotated[int | None, Between(0)] = None
    """Requests that are prefilled while all batch slots are taken; null takes a number that suits `max_batch`."""
    kv_dtype: Annotated[str, ("auto", "fp8_e4m3")] = "auto"
    """Dtype of stored keys and values: auto, which is the dtype of the weights, or fp8_e4m3."""
    kv_scales: str | None = None
    """File with a scale of the float8 cache for each layer and head, which `task=kv_scales` writes; null: 1."""
    deterministic: bool = False
    """Compute each token of the target bit for bit alike, regardless of the rest of the batch, so that speculation
    changes no output in half precision either. Needs `backend=fa4` and the fused forward."""
    adaptive: bool = False
    """Choose the draft length of every step, from no draft to the algorithm's own number of nodes."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the key, or settings that exclude each other."""
        super().__post_init__()
        if self.kv_scales is not None and self.kv_dtype == "auto":
            raise ValueError("runtime.kv_scales is for runtime.kv_dtype=fp8_e4m3, got runtime.kv_dtype=auto")
        for key, value in dict(forward=self.forward, impl=self.impl).items():
            if self.deterministic and value in ("torch", "reference"):
                raise ValueError(f"runtime.deterministic=true needs the fused kernels, got runtime.{key}={value}")
        if self.weight_dtype != "auto" and self.tensor_parallel > 1:
            raise ValueError(
                f"runtime.weight_dtype={self.weight_dtype}: scales are not divided among processes: expected "
                f"runtime.tensor_parallel=1, got {self.tensor_parallel}"
            )
        if self.adaptive and self.graph in ("draft", "verify"):
            raise ValueError(
                "runtime.adaptive=true: a step of each size is one CUDA graph: expected runtime.graph=auto, none or "
                f"step, got {self.graph}"
            )


def graph_level(asked: str, on_gpu: bool) -> str:
    """How much of a step is captured. `auto` is all of it on a GPU."""
    if asked != "auto":
        return asked
    return "step" if on_gpu else "none"


def runs_fused(settings: RuntimeSettings, on_gpu: bool, is_float32: bool) -> bool:
    """Whether models run fused kernels. `auto` is fused with `deterministic`, and in half precision on a GPU: in
    float32 there is no tensor core to feed, and outputs are compared with torch's forward."""
    if settings.forward == "auto":
        return (on_gpu and not is_float32 and settings.impl != "reference") or settings.deterministic
    return settings.forward == "fused"
