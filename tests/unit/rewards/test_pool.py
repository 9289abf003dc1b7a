"""Rewards that really hang and crash, in the real worker processes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rlhpc.errors import ConfigError, TrainingError
from rlhpc.rewards import RewardPool

ADVERSE = """
import ctypes, os, re, subprocess, sys, time

def reward(completion, ground_truth, scale=1.0):
    match completion:
        case "sleep":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "backtrack":  # inside the regex engine, holding the interpreter lock
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "exit":
            os._exit(3)
        case "quit":
            sys.exit(1)
        case "segfault":
            ctypes.string_at(0)
        case "raise":
            raise ValueError("refused")
        case "memory":
            return len(bytearray(5 * 1024**3))
        case "nan":
            return float("nan")
        case "infinite":
            return float("-inf")
        case "text":
            return "1.0"
        case "none":
            return None
        case "pid":
            return float(os.getpid())
        case "print":
            print("to the log")
            return 1.0
        case "alarm":  # what a reward may do to the timer mustn't matter
            import signal
            signal.alarm(0)
            return 1.0
        case "heavy":
            heavy = {"torch", "numpy", "ray", "vllm", "megatron", "transformers"}
            return float(bool(heavy & sys.modules.keys()))
    return scale * float(completion)

def boom(completion, ground_truth):
    raise AssertionError("never called")
"""


def is_alive(pid):
    """Running, not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_alive(pid)]


def children():
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


def pids_of(pool):
    return [worker.process.pid for worker in pool._workers]


def score(pool, *completions):
    return [(result.score, result.status) for result in pool.score([(c, "", "") for c in completions])]


@pytest.fixture(scope="module")
def adverse(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "adverse.py"
    path.write_text(ADVERSE)
    return path


@pytest.fixture
def pool(adverse):
    with RewardPool(f"{adverse}:reward", timeout_s=0.7, num_workers=2) as pool:
        pool.wait_ready()
        yield pool


def test_order_and_dispatch_by_data_source():
    with RewardPool(num_workers=2) as pool:
        items = [("#### 7", "7", "openai/gsm8k"), ("7", "7", "arithmetic"), ("7", "8", "arithmetic")] * 50
        assert [result.score for result in pool.score(items)] == [1.0, 1.0, 0.0] * 50
        assert pool.score([]) == []


def test_kwargs_reach_the_reward(adverse):
    with RewardPool("gsm8k", {"method": "flexible"}, num_workers=1) as pool:
        assert pool.score([("it is 7.", "7", "anything")])[0].score == 1.0
    with RewardPool(f"{adverse}:reward", {"scale": 2.5}, num_workers=1) as pool:
        assert score(pool, "2") == [(5.0, "ok")]


@pytest.mark.parametrize("trouble", ["sleep", "spin", "backtrack"])
def test_a_hanging_reward_times_out_and_its_worker_is_replaced(pool, trouble):
    before = pids_of(pool)
    start = time.monotonic()
    expected = [(float(i), "ok") for i in range(20)]
    expected[3] = (0.0, "timeout")
    assert score(pool, *[trouble if i == 3 else str(i) for i in range(20)]) == expected
    assert time.monotonic() - start >= 0.7
    [gone] = [pid for pid in before if pid not in pids_of(pool)]
    assert not is_alive(gone)
    assert score(pool, "5", "6") == [(5.0, "ok"), (6.0, "ok")]


@pytest.mark.parametrize("trouble", ["exit", "quit", "segfault", "raise", "memory", "nan", "infinite", "text", "none"])
def test_a_failing_reward_is_an_error_and_costs_no_other_item(pool, trouble):
    expected = [(float(i), "ok") for i in range(20)]
    expected[3] = (0.0, "error")
    assert score(pool, *[trouble if i == 3 else str(i) for i in range(20)]) == expected


def test_details_say_what_went_wrong(pool, caplog):
    results = pool.score([(c, "", "") for c in ("raise", "segfault", "nan", "sleep", "1")])
    assert [result.detail for result in results] == [
        "ValueError: refused",
        "the reward's process died with exit code -11",
        f"reward {pool._name} returned nan, must be a finite number",
        "no result within 0.7 s",
        "",
    ]
    assert "4 of 5 rewards failed; the first: ValueError: refused" in caplog.text


def test_a_reward_that_always_hangs_cannot_stall_a_step(adverse):
    with RewardPool(f"{adverse}:reward", timeout_s=0.1, num_workers=1) as pool:
        results = pool.score([("1", "", "")] * 5 + [("sleep", "", "")] * 5000)
        assert [result.status for result in results] == ["ok"] * 5 + ["timeout"] * 5000
        assert results[-1].detail == "not evaluated: 10 of 15 before it timed out"
        assert score(pool, "2") == [(2.0, "ok")]


def test_what_a_reward_does_to_the_timer_or_stdout_is_harmless(adverse, capfd):
    with RewardPool(f"{adverse}:reward") as pool:
        assert score(pool, "alarm", "print", "1") == [(1.0, "ok")] * 3
    out, err = capfd.readouterr()
    assert out == "" and "to the log" in err


def test_workers_are_light(pool):
    assert score(pool, "heavy") == [(0.0, "ok")]
    assert {status for _, status in score(pool, *["1"] * 20_000)} == {"ok"}


def test_any_thread_many_at_once(pool):
    outcome = {}

    def run(k):
        outcome[k] = score(pool, *[str(k + i) for i in range(30)], "sleep" if k == 2 else "0")

    threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert outcome == {
        k: [(float(k + i), "ok") for i in range(30)] + [(0.0, "timeout" if k == 2 else "ok")] for k in range(4)
    }


def test_workers_outlive_the_thread_that_made_the_pool(adverse):
    made = []
    thread = threading.Thread(target=lambda: made.append(RewardPool(f"{adverse}:reward", num_workers=1)))
    thread.start()
    thread.join()
    with made[0] as pool:
        assert score(pool, "1") == [(1.0, "ok")]


def test_signals_to_the_whole_step_leave_workers_alone(pool):
    before = pids_of(pool)
    for pid in before:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)
    assert score(pool, *"1234") == [(float(c), "ok") for c in "1234"]
    assert pids_of(pool) == before


def test_a_worker_that_died_between_steps_is_replaced(pool):
    os.kill(pids_of(pool)[0], signal.SIGKILL)
    assert wait_until_gone(pids_of(pool)[:1], 5) == []
    assert {status for _, status in score(pool, *["1"] * 50)} <= {"ok"}


def test_close_leaves_nothing_behind(adverse):
    before, descriptors = children(), set(os.listdir("/proc/self/fd"))
    pool = RewardPool(f"{adverse}:reward", timeout_s=0.3, num_workers=3)
    score(pool, "1", "sleep", "exit", "2")
    pids = pids_of(pool)
    pool.close()
    pool.close()
    assert not any(map(is_alive, pids)) and children() == before
    assert set(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(TrainingError, match="closed"):
        score(pool, "1")


def test_a_forgotten_pool_ends_its_workers(adverse):
    pool = RewardPool(f"{adverse}:reward", num_workers=1)
    pids = pids_of(pool)
    del pool
    assert wait_until_gone(pids, 5) == []


@pytest.mark.parametrize("busy_with", ["nothing", "sleep", "backtrack"])
def test_workers_die_with_a_killed_parent(adverse, busy_with, tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
            import rlhpc.rewards.pool as pool_module
            pool = pool_module.RewardPool("{adverse}:reward", timeout_s=0.5, num_workers=2)
            pool.wait_ready()
            pool._timeout_s = 1000.0  # the parent would wait; the workers still know 0.5 s
            print(*[worker.process.pid for worker in pool._workers], flush=True)
            if "{busy_with}" != "nothing":
                pool.score([("{busy_with}", "", "")] * 2)
            import time
            time.sleep(1000)
        """)
    )
    root = str(Path(__file__).parents[3])
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    time.sleep(0.3)
    assert all(map(is_alive, pids))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    # Idle ones see the closed socket; those in a reward are ended by the kernel's timer, 0.5 + 1 s.
    assert wait_until_gone(pids, 5) == []


def test_wrong_set_ups_are_refused_with_a_fix(adverse, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("import a_module_that_is_nowhere")
    for name, kwargs, message in [
        ("gsm9k", {}, "unknown reward 'gsm9k'; choose"),
        (f"{tmp_path}/none.py:reward", {}, "none.py doesn't exist"),
        (str(adverse), {}, "must be of the form path/to/file.py:function"),
        (None, {"method": "strict"}, "needs reward.name"),
        ("gsm8k", {"method": object()}, "must be plain values"),
    ]:
        with pytest.raises(ConfigError, match=message):
            RewardPool(name, kwargs)
    for name, kwargs, message in [
        (f"{adverse}:rewards", {}, "has no function 'rewards', only boom, reward"),
        (
            f"{adverse}:reward",
            {"bias": 1},
            r"called with \(completion, ground_truth, bias=1\), and takes .* 'bias'; mend",
        ),
        (f"{broken}:reward", {}, "ModuleNotFoundError: No module named 'a_module_that_is_nowhere'"),
        ("gsm8k", {"method": "loose"}, "method='loose'"),
    ]:
        with RewardPool(name, kwargs, num_workers=1) as pool, pytest.raises(ConfigError, match=message):
            pool.wait_ready()
    with pytest.raises(ConfigError, match="num_workers=0"):
        RewardPool("gsm8k", num_workers=0)


def test_unknown_data_sources_are_refused_before_anything_runs():
    with RewardPool(num_workers=1) as pool:
        pool.check_sources(["arithmetic", "openai/gsm8k"])
        with pytest.raises(ConfigError, match="data_source='poems'; known:"):
            pool.check_sources(["arithmetic", "poems"])
        with pytest.raises(ConfigError, match="data_source='poems'"):
            pool.score([("1", "1", "poems")])
    with RewardPool("arithmetic", num_workers=1) as pool:
        pool.check_sources(["poems"])


def test_a_file_that_crashes_while_loading_stops_the_run(tmp_path):
    crashing = tmp_path / "crashing.py"
    crashing.write_text("import os\nos._exit(7)")
    died = pytest.raises(TrainingError, match="died with exit code 7 while starting")
    with RewardPool(f"{crashing}:reward", num_workers=1) as pool, died:
        pool.wait_ready()
