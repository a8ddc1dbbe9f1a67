"""Sizes of the programs, by chip."""

from dataclasses import dataclass, replace

from specdec_kernels.launch import CHIPS


@dataclass(frozen=True)
class HistoryConfig:
    """Sizes of one program's share."""

    scan: int  # positions that a program reads
    few: int  # requests up to which each reads all hits
    select: int  # hits that a program compares at once
    parts: int  # programs that select for one request, at most
    programs: int  # programs that select for all requests, where each has one at least
    hash: int  # requests that a program enters in the hash tables
    copy: int  # tokens that a program writes


_GPU = HistoryConfig(scan=256, few=32, select=256, parts=32, programs=1 << 14, hash=128, copy=256)
CONFIGS = dict.fromkeys(CHIPS, _GPU) | {
    "gfx942": replace(_GPU, hash=256),
    # In the interpreter the number of programs costs, not the number of lanes.
    "interpreter": HistoryConfig(scan=1 << 14, few=1, select=1 << 10, parts=2, programs=6, hash=1 << 12, copy=1 << 14),
}
NEW_HISTORIES = 16  # histories whose ends are read first: as many as fill the list of a frequent token


def draft_warps(candidates: int, nodes: int, requests: int) -> int:
    """Warps of a program that drafts, whose tiles are [candidates, nodes] and [candidates, candidates]. Four warps are
    quicker than one, though not four times: they are used where there are few programs."""
    return 4 if requests <= 512 else min(4, max(1, candidates * max(candidates, nodes) // 256))
