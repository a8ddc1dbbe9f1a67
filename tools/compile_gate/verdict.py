"""Whether a compiled kernel stays within the limits of its chip, and the table that says so."""

from collections.abc import Iterable
from dataclasses import dataclass

from specdec_kernels.launch import CHIPS
from tools.compile_gate.jobs import Job
from tools.compile_gate.usage import Usage

LIMITS = {"sm80": (163 * 1024, 0), "sm90": (227 * 1024, 0), "sm100": (227 * 1024, 512), "gfx942": (64 * 1024, 0)}
"""Bytes of shared memory that one program may take, and columns of tensor memory."""


@dataclass(frozen=True)
class AllowedSpill:
    """A spill that is allowed up to `spill_bytes` bytes, and why; only where one of `variants` is named."""

    spill_bytes: int
    reason: str
    variants: tuple[str, ...] = ("",)


# (kernel, chip) -> its allowed spill on that chip; any other excess fails.
_TWO_SUMS = "of the two sums of a walk over all splits; they are stored and read once a split, outside of its loop"
_FIXED = ("FIXED=True",)
_FEW_TOKENS = AllowedSpill(
    24, "a few registers, for the vocabulary of the tests; a shipped one spills none", ("VOCAB=60 ", "VOCAB=100 ")
)
_CODES = "FP8=1 BLOCK_M=128"
ALLOWED_SPILLS: dict[tuple[str, str], AllowedSpill] = {
    ("_mla_hopper_kernel", "sm90"): AllowedSpill(16, "stored before the loop and read after it"),
    ("_attention_kernel", "sm80"): AllowedSpill(8, _TWO_SUMS, _FIXED),
    ("_attention_kernel", "sm90"): AllowedSpill(
        72, _TWO_SUMS + "; and two registers of 128 rows over codes, which leave the loop alone too", (*_FIXED, _CODES)
    ),
    ("_hopper_kernel", "sm90"): AllowedSpill(
        72,
        "arguments, read back once for each work item; else in the producer, which waits for buffers anyway",
        ("FP8=False BLOCK_M=128",),
    ),
    ("_tree_attention_kernel", "sm80"): AllowedSpill(8, _TWO_SUMS),
    ("_tree_attention_kernel", "sm90"): AllowedSpill(144, _TWO_SUMS + "; tiles of more than one warp are slower"),
    ("_attention_kernel", "sm100"): AllowedSpill(
        216, _TWO_SUMS + "; and two registers of float16 rows over codes", (*_FIXED, "FP8=1 BLOCK_M=16 BLOCK_N=32")
    ),
    ("_tree_kernel", "sm90"): AllowedSpill(
        968,
        "matrices that wait while the state is read; narrower tiles spill none, repeat them and take twice as long",
        ("BLOCK_V=128 ",),
    ),
    ("_residual_kernel", "sm80"): _FEW_TOKENS,
    ("_bottom_up_kernel", "sm80"): _FEW_TOKENS,
    ("_bottom_up_kernel", "sm100"): _FEW_TOKENS,
}


@dataclass(frozen=True)
class Row:
    """A line of the table: a job, and what its kernel takes or why it does not compile."""

    job: Job
    result: Usage | str

    @property
    def verdict(self) -> str:
        """`ok`, `allowed: ` and the reason of a listed spill, or what is wrong."""
        if isinstance(self.result, str):
            return self.result
        problems = _excesses(self.result, self.job)
        allowed = ALLOWED_SPILLS.get((self.job.name, self.job.chip))
        if allowed and allowed.reason.strip() and len(problems) == 1:
            named = any(name in self.job.variant for name in allowed.variants)
            if named and 0 < self.result.spill_bytes <= allowed.spill_bytes:
                return f"allowed: {allowed.reason}"
        return "; ".join(problems) or "ok"

    @property
    def passes(self) -> bool:
        return self.verdict == "ok" or self.verdict.startswith("allowed: ")


def _excesses(usage: Usage, job: Job) -> list[str]:
    problems, (shared_bytes, tensor_columns) = [], LIMITS[job.chip]
    if usage.spill_bytes and not job.checking:
        problems.append(f"spills {usage.spill_bytes} bytes")
    if usage.shared_bytes > shared_bytes:
        problems.append(f"shared {usage.shared_bytes} > {shared_bytes}")
    if usage.tensor_columns > tensor_columns:
        problems.append(f"tensor memory {usage.tensor_columns} > {tensor_columns}")
    if usage.has_dot and not usage.tensor_core and not job.checking:
        problems.append("dot without tensor-core instructions")
    return problems


def table(rows: Iterable[Row]) -> str:
    order = {chip: place for place, chip in enumerate(CHIPS)}
    columns = f"{'regs':>5}{'spill':>6}{'shared':>8}{'tmem':>5}{'mma':>8}"
    lines = [f"{'kernel':<24}{'chip':<8}{columns}  verdict | variant"]
    for row in sorted(rows, key=lambda r: (r.job.name, r.job.variant, order[r.job.chip])):
        used = row.result
        numbers = f"{'-':>5}{'-':>6}{'-':>8}{'-':>5}{'-':>8}"
        if isinstance(used, Usage):
            numbers = f"{used.registers:>5}{used.spill_bytes:>6}{used.shared_bytes:>8}{used.tensor_columns:>5}"
            numbers += f"{used.tensor_core or '-':>8}"
        lines.append(f"{row.job.name:<24}{row.job.chip:<8}{numbers}  {row.verdict} | {row.job.variant}")
    return "\n".join(lines)
