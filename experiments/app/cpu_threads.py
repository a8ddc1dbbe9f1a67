"""How many threads torch computes with on a CPU, and how they wait. No torch is imported here."""

import math
import os
from pathlib import Path

SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def physical_cores() -> int:
    """Cores that this process may use: hyperthreads count once, affinity and the quota of a container are kept."""
    allowed = os.sched_getaffinity(0)
    cores = len({_read(Path(SIBLINGS.format(cpu))) or str(cpu) for cpu in allowed})
    share, _, period = _read(QUOTA).partition(" ")
    quota = math.ceil(int(share) / int(period)) if share.isdigit() and period else cores
    return max(1, min(cores, quota))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def settle_threads() -> None:
    """Choose them for this process and its children, unless the environment has. Call it before torch is imported."""
    # A step on a CPU is thousands of small operations, each with a barrier. Threads that spin there keep their core
    # from the thread they wait for as soon as there are fewer free cores than threads. So there is one thread for each
    # physical core, and a waiting thread sleeps.
    os.environ.setdefault("OMP_NUM_THREADS", str(physical_cores()))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
