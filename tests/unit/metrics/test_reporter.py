"""The reporter's file, table, terminal and wandb, each the real thing."""

from __future__ import annotations

import io
import os
import pty
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhpc.config.schema import RunConfig
from rlhpc.errors import ConfigError
from rlhpc.metrics.console import Console, duration
from rlhpc.metrics.jsonl import MetricsFile
from rlhpc.metrics.records import MEASURED
from rlhpc.metrics.reporter import Reporter

VAL = "val-core/arithmetic/reward/mean@1"


def config(*loggers: str) -> RunConfig:
    cfg = RunConfig()
    cfg.trainer.logger = list(loggers)
    cfg.trainer.wandb_mode = "offline"
    cfg.trainer.n_gpus_per_node = 2
    return cfg


def record(step: int) -> dict[str, float]:
    metrics = {"timing_s/gen": 0.25, "timing_s/update_actor": 0.5, "timing_s/ranks/gen": 0.2}
    if step > 0:
        metrics |= {
            "critic/score/mean": step / 8,
            "response_length/mean": 6.0,
            "prompt_length/mean": 2.0,
            "perf/total_num_tokens": 1600,
            "perf/mean_context_tokens": 4.5,
        }
    return metrics | ({VAL: 0.25 + step / 8} if step % 4 == 0 else {})


def repeatable(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not name.startswith(MEASURED)} for row in rows]


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    files = {}
    for name in ("whole", "resumed"):
        with Reporter(config(), tmp_path / name, 5) as reporter:
            reporter.cut_back(0)
            for step in range(5):
                reporter.log(step, record(step))
        files[name] = MetricsFile(tmp_path / name / "metrics.jsonl")
    # Step 2 was the last committed: the loop logs it once more and goes on.
    with Reporter(config(), tmp_path / "resumed", 5) as reporter:
        reporter.cut_back(2)
        assert [row["step"] for row in files["resumed"].read()] == [0, 1]
        for step in range(2, 5):
            reporter.log(step, record(step))
    assert repeatable(files["resumed"].read()) == repeatable(files["whole"].read())


def test_a_step_is_timed_from_log_to_log_and_by_its_phases_after_a_restart(tmp_path: Path) -> None:
    with Reporter(config(), tmp_path, 5) as reporter:
        reporter.log(1, record(1))
        reporter.log(2, record(2))
    first, second = MetricsFile(tmp_path / "metrics.jsonl").read()
    assert first["timing_s/step"] == first["perf/time_per_step"] == 0.75
    assert first["perf/throughput"] == pytest.approx(1600 / 0.75 / 2)
    assert first["timing_per_token_ms/gen"] == pytest.approx(250 / 1200)
    assert second["timing_s/step"] < 0.5  # wall time: nothing was slept


def test_the_table_is_aligned_and_the_summary_says_what_was_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Reporter(config("console"), tmp_path, 128) as reporter:
        for step in range(5):
            reporter.progress(step, "gen", 0.5)
            reporter.log(step, record(step))
        reporter.generations(4, [{"prompt": "1 +\n1=", "response": "2", "ground_truth": "2", "reward": 1.0}] * 9)
        reporter.close_run(4, finished=False)
    lines = capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d  .*", line) for line in lines), "whole lines only, without a bar"
    header, rows = lines[0], lines[1:6]
    assert {len(line) for line in (header, *rows)} == {len(header)}
    assert [row.split()[1] for row in rows] == [f"{step}/128" for step in range(5)]
    end = header.index("reward") + len("reward")
    assert [row[:end].split()[-1] for row in rows] == ["-", "0.125", "0.250", "0.375", "0.500"]
    end = header.index("val") + len("val")
    assert [row[:end].split()[-1] for row in rows] == ["0.250", "-", "-", "-", "0.750"]
    assert [line.split("  ", 1)[1] for line in lines[6:9]] == [
        "val step 4: '1 + 1=' -> '2' (expected '2', reward 1)"
    ] * 3
    summary = "\n".join(lines[9:])
    assert "stopped after step 4 of 128" in summary and "6,400 tokens" in summary
    assert f"{VAL}  0.250 at step 0 -> 0.750 at step 4" in summary
    assert str(tmp_path) in summary and "the same command goes on from here" in summary


def test_remaining_time() -> None:
    out = io.StringIO()
    console = Console(100, out)
    console.row(1, {"perf/time_per_step": 60.0})
    console.row(2, {"perf/time_per_step": 20.0})
    console.close()
    assert out.getvalue().splitlines()[-1].endswith("1h05m")  # 98 steps of 40 s
    assert [duration(s) for s in (0.4, 59.6, 125, 7620, 392400)] == ["0s", "1m00s", "2m05s", "2h07m", "4d13h"]


def test_a_terminal_gets_a_bar_below_the_same_lines() -> None:
    leader, follower = pty.openpty()
    chunks: list[bytes] = []

    def drain() -> None:
        try:
            while chunk := os.read(leader, 65536):
                chunks.append(chunk)
        except OSError:  # how Linux ends a terminal whose other side is closed
            return

    reader = threading.Thread(target=drain)
    reader.start()
    with os.fdopen(follower, "w") as stream:
        console = Console(4, stream)
        console.doing("reading 61.2 GiB")
        console.progress(1, "gen", 0.5)
        console.row(1, {"perf/time_per_step": 2.0, "critic/score/mean": 0.375})
        console.progress(2, "testing", 0.25)
        console.say("a note")
        console.close()
    reader.join(timeout=10)
    os.close(leader)
    output = b"".join(chunks).decode()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert "\x1b[" in output and "━" in output
    assert re.search(r"1/4 +0\.375", text) and "step 2 testing  25%" in text
    assert "reading 61.2 GiB" in text
    assert re.search(r"\d\d:\d\d:\d\d  a note", text)
    assert output.rstrip("\n").endswith("\x1b[2K"), "the bar is wiped at the end"


def test_unknown_loggers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer.logger=\['tensorbord'\] is unknown; choose among console"):
        Reporter(config("console", "tensorbord"), tmp_path, 1)


def wandb_records(path: Path) -> list[Any]:
    """The protobuf records of an offline run, once wandb's own process, which writes on after `finish`, is done."""
    deadline = time.monotonic() + 60
    while not (records := list(_read_wandb(path))) or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{path} has no exit record"
        time.sleep(0.05)
    return records


def _read_wandb(path: Path) -> Iterator[Any]:
    """After a file header of 7 bytes a LevelDB log: blocks of 32 KiB of fragments with a header of CRC32 (4
    bytes), length (2) and type (1: whole, 2: first, 3: middle, 4: last)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        at += 7 + length
        if at > len(data):
            return  # still being written
        record += data[at - length : at]
        if kind in (1, 4):
            yield Record.FromString(record)
            record = b""


def test_wandb_keeps_one_run_across_restarts(tmp_path: Path) -> None:
    cfg = config("wandb")
    ids: list[str | None] = []
    for begin in (0, 2):
        with Reporter(cfg, tmp_path, 4) as reporter:
            ids.append(reporter.wandb_id)
            reporter.cut_back(begin)
            for step in range(begin, begin + 3):
                reporter.log(step, record(step) | {"actor/pg_loss": float("nan")})
    assert ids[0] == ids[1] == (tmp_path / "wandb_id").read_text()
    segments = sorted((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}*"))
    assert len(segments) == 2
    steps, scores, exits = [], {}, []
    for segment in segments:
        for entry in wandb_records(segment / f"run-{ids[0]}.wandb"):
            kind = entry.WhichOneof("record_type")
            if kind == "run":
                assert (entry.run.run_id, entry.run.project) == (ids[0], cfg.trainer.project_name)
            if kind == "exit":
                exits.append(entry.exit.exit_code)
            if kind == "history":
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in entry.history.item}
                steps.append(entry.history.step.num)
                scores[steps[-1]] = items.get("critic/score/mean")
                assert "actor/pg_loss" not in items
    assert steps == [0, 1, 2, 2, 3, 4] and exits == [0, 0]
    assert scores == {0: None, 1: "0.125", 2: "0.25", 3: "0.375", 4: "0.5"}


def test_a_failed_run_is_marked_failed_and_says_how_to_upload_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError), Reporter(config("wandb"), tmp_path, 4) as reporter:
        reporter.close_run(0, finished=False)
        raise KeyError
    (segment,) = (tmp_path / "wandb").glob("offline-run-*")
    records = wandb_records(next(segment.glob("*.wandb")))
    assert [e.exit.exit_code for e in records if e.WhichOneof("record_type") == "exit"] == [1]
    assert f"{tmp_path}/wandb/offline-run-*-{reporter.wandb_id}*" in capsys.readouterr().out


def test_without_wandb_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['wandb'] = None\n"  # what Python itself consults: the import then fails
        "from pathlib import Path; from rlhpc.metrics.wandb import WandbRun\n"
        f"WandbRun(Path({str(tmp_path)!r}), project='p', name='n', mode='offline', config={{}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ConfigError: trainer.logger names wandb, which is not installed; pip install wandb" in done.stderr


def test_wandb_online_without_a_login_is_an_error_to_act_on(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from rlhpc.metrics.wandb import WandbRun\n"
        f"WandbRun(Path({str(tmp_path)!r}), project='p', name='n', mode='online', config={{}})"
    )
    env = {k: v for k, v in os.environ.items() if k != "WANDB_API_KEY"}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL
    )
    assert "set trainer.wandb_mode=offline" in done.stderr
