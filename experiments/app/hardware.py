"""The device, the dtype and the implementation of a run, settled once."""

import importlib.util
import os
from dataclasses import dataclass

from algorithms.engine.settings import RuntimeSettings, runs_fused
from experiments.app.errors import UserError

INTERPRET = "TRITON_INTERPRET"
INTERPRETER = "triton-interpreter"  # the label in records of kernels that Triton's interpreter runs


@dataclass(frozen=True)
class Hardware:
    """The device of a run and its implementation: `impl` in the engine's settings, `label` in records. `forward` is
    fused or torch."""

    device: str
    dtype: str
    impl: str
    label: str
    forward: str = "torch"

    @property
    def can_capture(self) -> bool:
        """Whether CUDA graphs exist on this device."""
        return self.device == "cuda"


def resolve_hardware(runtime: RuntimeSettings) -> Hardware:
    """Settle every `auto` of `runtime`. Raises UserError where the machine lacks it. Without a GPU this switches
    Triton's interpreter on, which must happen before Triton is imported."""
    import torch

    has_gpu = torch.cuda.is_available()
    if runtime.device == "cuda" and not has_gpu:
        raise UserError(
            f"runtime.device=cuda: no CUDA device is visible to torch {torch.__version__}\n"
            "use runtime.device=cpu (kernels run in Triton's interpreter), or install a CUDA build of torch"
        )
    device = "cuda" if has_gpu and runtime.device != "cpu" else "cpu"
    dtype = runtime.dtype if runtime.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    forward = "fused" if runs_fused(runtime, device == "cuda", dtype == "float32") else "torch"
    if runtime.impl == "reference":
        return Hardware(device, dtype, "reference", "reference", forward)
    if importlib.util.find_spec("triton") is None:
        raise UserError("Triton is not installed\npip install triton, or use runtime.impl=reference")
    if device == "cpu":
        if dtype == "bfloat16":
            raise UserError(
                "runtime.dtype=bfloat16 without a GPU: Triton's interpreter computes bfloat16 wrongly\n"
                "use runtime.dtype=float32, or runtime.impl=reference"
            )
        os.environ[INTERPRET] = "1"
    label = INTERPRETER if os.environ.get(INTERPRET) == "1" else "triton"
    return Hardware(device, dtype, "triton", label, forward)
