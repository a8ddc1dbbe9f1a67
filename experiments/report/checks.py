"""Checks of results: failures, which make a run not lossless, and warnings."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from experiments.app.hardware import INTERPRETER
from experiments.report.intervals import spread
from experiments.report.metrics import num_faults

Labelled = Sequence[tuple[str, Mapping[str, Any]]]  # results with what a warning calls them
LOW_ACCEPTANCE = 0.05
FEW_FIRST_DRAFTS = 20  # of so few a share says nothing
LARGEST_SPREAD = 0.2
MOST_NAMED = 10  # results that one warning names
NOT_A_GPU = {
    INTERPRETER: "Times are of Triton's interpreter on the CPU and say nothing about a GPU.",
    "reference": "Times are of plain torch on the CPU and say nothing about a GPU.",
}


def describe_difference(found: Mapping[str, Any] | None, dtype: str) -> str:
    """The place at which two outputs differ: both tokens, their logits and the gap. Empty where nothing is known."""
    if not found:
        return ""

    def token(prefix: str) -> str:
        number, logit = found[f"{prefix}token"], found.get(f"{prefix}logit")
        shown = "" if logit is None else f" (logit {logit:.6g})"
        return "the end of the output" if number is None else f"token {number}{shown}"

    place = f"request {found['request']}, position {found['position']}"
    said = f"{place}: {token('')}, the baseline has {token('baseline_')}"
    if (gap := found.get("gap")) is not None:
        said += f", gap {gap:.2g}"
        if (bound := found.get("bound")) is not None:
            said += f", a numerical tie in {dtype} is at most {bound:.1g}"
    return said


def failures(result: Mapping[str, Any], dtype: str, exact: bool) -> list[str]:
    """Why outputs are wrong: in an `exact` run they must be those of autoregressive decoding, numerical ties aside."""
    comparison = result.get("lossless")
    if not comparison or not exact or not num_faults(comparison):
        return []
    faults = f"{num_faults(comparison)} of {comparison['checked']} requests"
    where = describe_difference(comparison["first_difference"], dtype)
    return [f"{faults} differ from autoregressive decoding in {dtype}" + (f"; {where}" if where else "")]


def warnings(result: Mapping[str, Any], dtype: str, exact: bool) -> list[str]:
    """A drafter that is never right, tokens that differ from the baseline's, times that are not reliable or missing.
    What `failures` says is not said again."""
    return [*_output_warnings(result), *_difference_warnings(result, dtype, exact), *_time_warnings(result)]


def _output_warnings(result: Mapping[str, Any]) -> Iterator[str]:
    first = result["acceptance_at"][0] if result.get("acceptance_at") and not _few_first_drafts(result) else None
    if result.get("drafts_with_model", True) and first is not None and first < LOW_ACCEPTANCE:
        why = "the drafter is probably wired wrongly, or was trained for another target or other text"
        yield f"only {first:.1%} of first drafts were accepted: {why}"
    if unparsed := result.get("num_constrained", 0) - result.get("num_parsed", 0):
        outputs = f"{unparsed} of {result['num_constrained']} outputs are incomplete in their grammar"
        yield f"{outputs}; truncated by sampling.max_new_tokens: {result['num_cut']}"


def _few_first_drafts(result: Mapping[str, Any]) -> bool:
    counts = result.get("acceptance")
    return counts is not None and counts["accepted"][0] + counts["rejected"][0] < FEW_FIRST_DRAFTS


def _difference_warnings(result: Mapping[str, Any], dtype: str, exact: bool) -> list[str]:
    comparison = result.get("lossless") or {"checked": 0, "identical": 0}
    near, differing = comparison.get("near_ties", 0), comparison["checked"] - comparison["identical"]
    first = comparison.get("first_difference")
    if exact:
        differing, first = near, None if num_faults(comparison) else first  # the others are failures
    if not differing:
        return []
    requests = f"{differing} of {comparison['checked']} requests"
    said = f"{requests} differ from autoregressive decoding, {near} at a numerical tie"
    if not exact:
        said += "; low precision rounds one row and many rows differently, runtime.deterministic=true does not"
    where = describe_difference(first, dtype)
    return [f"{said}; first: {where}" if where else said]


def _time_warnings(result: Mapping[str, Any]) -> Iterator[str]:
    speedup, tokens = result.get("speedup_decode"), result.get("tokens_per_step")
    if speedup and tokens and speedup > max(tokens, 1.0):
        why = "no step is faster than the baseline's, so the times are not reliable"
        yield f"a decode speedup of {speedup:.2f}× is above its {tokens:.2f} tokens/step: {why}"
    if differing := result.get("differing_rounds"):
        yield f"rounds with other outputs than the first: {differing}"
    if resumed := result.get("num_resumed"):
        yield f"{resumed} of {result['num_requests']} requests ended before the run was resumed"
    if result.get("num_timed_rounds") == 0:
        yield "no rates and no speedups: no process of the resumed run decoded a whole round of all methods"
    if compiled := result.get("compiled"):
        kernels = ", ".join(result["compiled_kernels"])
        yield f"{compiled} kernels were compiled after the warm-up, and the times include that: {kernels}"


def warnings_of_all(results: Labelled) -> list[str]:
    """Warnings that name several results in one line: truncated answers, rounds that differ."""
    found, answers = [], [(label, result["answers"]) for label, result in results if result.get("answers")]
    if cut := [f"{label}: {counts['cut']} of {sum(counts.values())}" for label, counts in answers if counts["cut"]]:
        found.append(f"answers truncated by sampling.max_new_tokens do not count in accuracy ({several(cut)})")
    rates = [(label, (result.get("rounds") or {}).get("decode_tokens_per_s", [])) for label, result in results]
    if wide := [f"{label}: {spread(each):.0%}" for label, each in rates if spread(each) > LARGEST_SPREAD]:
        more = f"decode tokens/s differ by more than {LARGEST_SPREAD:.0%} of their mean between rounds"
        found.append(f"{more} ({several(wide)}): end other programs on the machine, or raise task.repeats")
    return found


def several(names: Sequence[str]) -> str:
    """The first of `names`, and how many more there are."""
    more = len(names) - MOST_NAMED
    return "; ".join(names[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
