"""A driver without Ray and training, for tests of what surrounds a run: steps that only take time, with all the files
that a run leaves. A stop commits a checkpoint, once a step was taken. `<run_dir>/fail` makes it fail, with the file's
text as its error; `<run_dir>/stay` keeps a run's first attempt in its last step until it is told to stop.

    python -m tests.slurm.stepper RUN_DIR NUM_STEPS SECONDS_PER_STEP
"""

import os
import sys
import time
from pathlib import Path

import torch

from rlhpc.checkpoint.store import CheckpointStore
from rlhpc.cluster.attempt import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, Attempt
from rlhpc.cluster.stop import StopFlag, StopRequested
from rlhpc.errors import TrainingError
from rlhpc.metrics.jsonl import MetricsFile
from rlhpc.train.progress import Progress


def take_steps(run_dir: Path, num_steps: int, seconds: float, progress: Progress, stop: StopFlag) -> None:
    store, metrics = CheckpointStore(run_dir / "checkpoints"), MetricsFile(run_dir / "metrics.jsonl")
    step = begun_at = max(store.steps(), default=0)
    stays = step == 0 and (run_dir / "stay").exists()
    progress.plan(num_steps)
    print(f"going on after step {step}", flush=True)
    while step < num_steps and not stop.requested():
        progress.enter(step + 1, "generate")
        time.sleep(seconds)
        if stays and step == num_steps - 1:
            continue
        if (fail := run_dir / "fail").exists():
            raise TrainingError(fail.read_text())
        step += 1
        print(f"step {step}", flush=True)
        metrics.append(step, {"critic/score/mean": step / num_steps, "perf/time_per_step": seconds})
    progress.enter(step, "save")
    begin = time.perf_counter()
    if step > begun_at:
        store.save(step, [({"weight": torch.full((4,), float(step))}, {})], {"step": step})
        progress.committed(step, time.perf_counter() - begin)
    if step < num_steps:
        stop.check()


def main(run_dir: Path, num_steps: int, seconds: float) -> int:
    attempt = Attempt.current(os.environ)
    stop = StopFlag(attempt)
    try:
        with stop.installed(), Progress(run_dir, attempt, stop) as progress:
            take_steps(run_dir, num_steps, seconds, progress, stop)
    except StopRequested:
        return EXIT_STOPPED
    except TrainingError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    return EXIT_FINISHED


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
