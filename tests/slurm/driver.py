"""A driver without a model: counts steps, saves its count when told to stop, keeps progress.json as the trainer does.

    python tests/slurm/driver.py STEPS [--step-s S] [--save-s S] [--fail CODE WORDS | --lose WORDS]

Goes on from the step that was saved last. While `<run_dir>/stay` is there a run's first attempt goes on beyond STEPS,
until it is told to stop or killed. With --fail it ends at once with that code and words; with --lose it ends as a
driver whose rank died.
"""

import argparse
import json
import os
import signal
import sys
import time

from rlhpc.cluster.attempt import Attempt, publish_text, read_json


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--save-s", type=float, default=0.5)
    parser.add_argument("--fail", nargs=2, metavar=("CODE", "WORDS"))
    parser.add_argument("--lose", metavar="WORDS")
    arguments = parser.parse_args()
    attempt = Attempt.current(os.environ)
    assert attempt
    path = attempt.run_dir / "progress.json"
    before = read_json(path)
    stays = before is None and (attempt.run_dir / "stay").exists()
    checkpoint = (before or {}).get("checkpoint")
    state = {"attempt": attempt.name, "pid": os.getpid(), "checkpoint": checkpoint, "outcome": "running"}
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))

    def write(**changes: object) -> None:
        state.update(changes)
        publish_text(path, json.dumps(state))

    step = checkpoint["step"] if checkpoint else 0
    write(step=step)
    print(f"from step {step}", flush=True)
    if arguments.fail:
        print(f"error: {arguments.fail[1]}", file=sys.stderr)
        return int(arguments.fail[0])
    if arguments.lose:
        write(outcome="lost", reason=arguments.lose)
        return 1
    while (stays or step < arguments.steps) and not told:
        time.sleep(arguments.step_s)
        step += 1
        write(step=step)
    if told:
        stop = {"phase": "generate", "at": time.time(), "seen_after_s": 0.0}
        time.sleep(arguments.save_s)
        saved = {"step": step, "at": time.time(), "save_s": arguments.save_s}
        write(checkpoint=saved, stop=stop, outcome="stopped")
        return 75
    write(outcome="finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())
