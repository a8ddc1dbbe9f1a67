"""A sweep over the nodes of a Ray cluster: two on one machine, with GPUs that are only counted.

`make test-distributed` runs it.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.app.schema import REPO_ROOT
from experiments.sweep.folder import DONE, SweepFolder

TOY = str(REPO_ROOT / "tests/experiments/toy_sweep.py")
pytestmark = pytest.mark.distributed


def environment(**variables: str) -> dict[str, str]:
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_AUTH_MODE": "disabled"}
    return {**os.environ, **own, "PYTHONPATH": str(REPO_ROOT), **variables}


@pytest.mark.timeout(280)
def test_a_node_that_is_lost_in_mid_sweep_costs_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(TOY_WAIT_S="1").items():
        monkeypatch.setenv(name, value)  # the raylets pass it on
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    try:
        nodes = [cluster.add_node(num_cpus=2, num_gpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        sweep = SweepFolder(tmp_path / "outputs/sweeps/nodes")
        command = [sys.executable, TOY, "-m", "sweep=nodes", "hydra/launcher=ray_cluster", "limit=1,2,3,4", "seed=0,1"]
        with subprocess.Popen(command, cwd=tmp_path, env=environment(RAY_ADDRESS=cluster.address)) as process:
            end = time.monotonic() + 120
            while len(list(sweep.path.glob("*/status.json"))) < 3 and time.monotonic() < end:
                time.sleep(0.05)
            cluster.remove_node(nodes[1], allow_graceful=False)
            assert process.wait(timeout=200) == 0
    finally:
        cluster.shutdown()
    records = sweep.records()
    assert [sweep.state(record.id) for record in records] == [DONE] * 8
    values = sorted((record.config["limit"], record.config["seed"]) for record in records)
    assert values == [(limit, seed) for limit in (1, 2, 3, 4) for seed in (0, 1)], "every row once"
    for record in records:
        requests = (sweep.path / record.id / "requests.jsonl").read_text().splitlines()
        assert [json.loads(line)["gpus"] for line in requests] == ["0"], "a row has one GPU, and one attempt counts"
