"""The settings of a run, `runtime.…` on the command line: declared here alone. No torch is imported."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_kernels.checks import expect_at_least, expect_between, expect_choice

LARGEST_INT32 = 2**31 - 1
WEIGHT_DTYPES = ("auto", "fp8", "fp8_w8a16")
LAST_CAPTURED = {"none": None, "draft": "draft", "verify": "verify", "step": "commit"}
"""Level of capture in CUDA graphs to the last phase that is captured, as all before it are."""
GRAPH_LEVELS = tuple(LAST_CAPTURED)


@dataclass
class RuntimeSettings:
    """Device, sizes and switches of a run. The engine settles what is `auto`."""

    device: str = "auto"
    """cpu or cuda; auto is cuda where a GPU is visible."""
    dtype: str = "auto"
    """Dtype of weights and activations: float32, float16 or bfloat16; auto is bfloat16 on a GPU and float32
    elsewhere."""
    weight_dtype: str = "auto"
    """Dtype of the weights of the projections of target and drafters: auto, which is as they are stored, or fp8, which
    quantises them as they are loaded, in blocks of 128 x 128. Activations of float8 weights are rounded to float8 too
    (W8A8); fp8_w8a16 leaves them."""
    impl: str = "auto"
    """triton or reference. Triton kernels are compiled on a GPU and run in Triton's interpreter elsewhere."""
    forward: str = "auto"
    """How models compute outside of attention: by fused kernels, or by torch; auto is fused in half precision on a
    GPU."""
    page_size: int = 16
    """Tokens of a KV page."""
    max_batch: int = 4
    """Requests that run at a time."""
    num_pages: int | None = None
    """Pages of the KV pool; null takes what `max_batch` requests of `max_length` tokens need."""
    max_length: int | None = None
    """Bound on prompt and new tokens of a request together; null takes the length of the longest request."""
    graph: str = "auto"
    """How much of a step is captured in CUDA graphs: none, draft, verify (draft and verify) or step; auto captures all
    of it on a GPU."""
    async_steps: int | None = None
    """Maximum number of steps in flight while the host reads an earlier one; null takes 1 on a GPU, 0 elsewhere."""
    tensor_parallel: int = 1
    """Processes that share the target."""
    prefill_chunk: int = 2048
    """Bound on the prompt tokens of one prefill batch."""
    prefill_tile: int | None = None
    """Tokens of a tile of a prefill batch; null takes a width that suits the device."""
    mixed_prefill: bool = True
    """Prefill prompts in captured decode steps, where requests run."""
    prefill_ahead: int | None = None
    """Requests whose prompts are prefilled while all batch slots are taken; null takes a number that suits
    `max_batch`."""
    kv_dtype: str = "auto"
    """Dtype of stored keys and values: auto, which is the dtype of the weights, or fp8_e4m3."""
    kv_scales: str | None = None
    """File with a scale of the float8 cache for each layer and head, which `task=kv_scales` writes; null: 1."""
    deterministic: bool = False
    """Compute each token of the target bit for bit alike, regardless of the rest of the batch, so that speculation
    changes no output in half precision either. Needs `backend=fa4` and the fused forward."""
    adaptive: bool = False
    """Choose the draft length of every step, from no draft to the algorithm's own number of nodes."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the key."""
        expect_choice("runtime.device", self.device, ("auto", "cpu", "cuda"))
        expect_choice("runtime.dtype", self.dtype, ("auto", "float32", "float16", "bfloat16"))
        expect_choice("runtime.weight_dtype", self.weight_dtype, WEIGHT_DTYPES)
        expect_choice("runtime.impl", self.impl, ("auto", "triton", "reference"))
        expect_choice("runtime.forward", self.forward, ("auto", "fused", "torch"))
        expect_choice("runtime.graph", self.graph, ("auto", *GRAPH_LEVELS))
        expect_choice("runtime.kv_dtype", self.kv_dtype, ("auto", "fp8_e4m3"))
        for name in ("tensor_parallel", "page_size", "prefill_chunk", "max_batch"):
            expect_at_least(f"runtime.{name}", getattr(self, name), 1)
        for name, least in dict(prefill_ahead=0, prefill_tile=1, max_length=2, async_steps=0).items():
            expect_at_least(f"runtime.{name}", getattr(self, name), least, nullable=True)
        expect_between("runtime.num_pages", self.num_pages, 1, LARGEST_INT32, nullable=True)
        self._check_pairs()

    def _check_pairs(self) -> None:
        """Raise ValueError for settings that exclude each other."""
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
        if self.graph not in ("auto", "none") and self.device == "cpu":
            raise ValueError(f"runtime.graph={self.graph} captures CUDA graphs: expected runtime.device=cuda, got cpu")
        if self.device == "cpu" and self.dtype == "bfloat16" and self.impl != "reference":
            raise ValueError(
                "runtime.dtype=bfloat16 on the CPU: Triton's interpreter computes bfloat16 wrongly; "
                "use runtime.dtype=float32, or runtime.impl=reference"
            )


def graph_level(asked: str, on_gpu: bool, capturable: bool) -> str:
    """How much of a step is captured. `auto` is all of it on a GPU, where the backend is `capturable`."""
    if asked != "auto":
        return asked
    return "step" if on_gpu and capturable else "none"


def runs_fused(settings: RuntimeSettings, on_gpu: bool, is_float32: bool) -> bool:
    """Whether models run fused kernels. `auto` is fused with `deterministic`, and in half precision on a GPU: in
    float32 there is no tensor core to feed, and outputs are compared with torch's forward."""
    if settings.forward == "auto":
        return (on_gpu and not is_float32 and settings.impl != "reference") or settings.deterministic
    return settings.forward == "fused"
