"""The ranks of a world over two nodes of an attempt, each a real process with its own Ray daemons."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.distributed.ray_attempts import nodes, shown, spec
from tests.tiny_model import write_tiny_model

DRIVER = """
import json, os, sys
from pathlib import Path
from rlhpc.cluster.attempt import Attempt
from rlhpc.cluster.ray_attempt import attempt_ray
from rlhpc.config.schema import RunConfig
from rlhpc.train.ray_ranks import RayRanks

model, logs = sys.argv[1:]
cfg = RunConfig()
cfg.actor_rollout_ref.model.path = model
cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node, cfg.trainer.device = 2, 1, "cpu"
cfg.actor_rollout_ref.actor.megatron.expert_model_parallel_size = 2
cfg.data.max_prompt_length = cfg.data.max_response_length = 16
cfg.reshard.verify_every = 1
with attempt_ray(cfg, Attempt.current(os.environ)) as placement:
    ranks = RayRanks(cfg, "cpu", placement, Path(logs))
    ranks.call("start")
    places = ranks.call("describe")
    received = ranks.call("publish", policy_version=0)
    ranks.close()
    print(json.dumps({"places": places, "received": [r["received_bytes"] for r in received]}))
"""


def test_a_world_spans_both_nodes_in_rank_order(tmp_path: Path) -> None:
    """One rank a node, the experts spread over both, an engine on each: publishing moves weights between the nodes and
    verifies them by fingerprint."""
    model = write_tiny_model(tmp_path / "model")
    logs = tmp_path / "logs"
    with nodes(tmp_path / "run", 4010, spec(ranks_per_node=1)) as pair:
        pair.start(2)
        driver = pair.driver(f"import sys; sys.argv[1:] = ['{model}', '{logs}']\n{DRIVER}", OMP_NUM_THREADS="1")
        found = shown(driver, timeout_s=400)
        sessions = [pair.record(node_id)["session"]["token"] for node_id in (0, 1)]
        master = pair.attempt.read("head")
    assert [place["replica_rank"] for place in found["places"]] == [0, 1]
    assert {place["num_replicas"] for place in found["places"]} == {2}
    assert all(received > 0 for received in found["received"])
    for rank in range(2):
        text = (logs / f"rank-{rank:05d}.log").read_text()
        assert re.search(rf"attempt 4010-0, rank {rank} of 2 on \S+, pid \d+", text), text[:500]
    assert master is not None and len(set(sessions)) == 2
    assert not [name for name in os.listdir("/dev/shm") if any(token in name for token in sessions)]
