"""What logs prints, from logs that a real job of two nodes left (recorded/), and of files that change under it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhpc.cli.logs import Selection, Tail, headline, logs
from rlhpc.cli.runs import Run
from rlhpc.errors import ConfigError
from tests.unit.cli.test_status import RECORDED, recorded

JOB_LOG = (RECORDED / "runs/requeued/slurm/88034.log").read_text()


def printed(run: Run, selection: Selection, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    logs(run.directory, selection, follow=False)
    return capsys.readouterr().out


def test_the_jobs_output_whole_its_end_and_of_one_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded("requeued", tmp_path)
    assert printed(run, Selection(), capsys) == JOB_LOG
    assert printed(run, Selection(lines=2), capsys) == (
        "0: step 30\n== rlhpc attempt 88034-2 finished; the run is complete\n"
    )
    assert printed(run, Selection(lines=0), capsys) == ""
    of_first = "".join(line for line in JOB_LOG.splitlines(keepends=True) if line.startswith("0: "))
    assert printed(run, Selection(node="0"), capsys) == printed(run, Selection(node="f1"), capsys) == of_first
    assert printed(run, Selection(node="f2"), capsys) == ""
    for absent in ("f3", "2"):
        with pytest.raises(ConfigError, match=rf"^node {absent} has no part in .*; choose f1 \(0\), f2 \(1\)$"):
            logs(run.directory, Selection(node=absent), follow=False)


def test_what_failed_first_comes_before_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded("failing", tmp_path)
    first = "== attempt 88035-0 failed first on f1: loss is nan"
    assert list(headline(run)) == [first]
    assert printed(run, Selection(), capsys).startswith(f"{first}\n== rlhpc attempt 88035-0 on f[1-2]")
    assert list(headline(recorded("requeued", tmp_path))) == []


def test_several_jobs_in_their_order_under_headers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded("requeued", tmp_path)
    (run.directory / "slurm/100001.log").write_text("0: later\n")
    text = printed(run, Selection(lines=1), capsys)
    assert text == (
        "==> slurm/88034.log <==\n"
        "== rlhpc attempt 88034-2 finished; the run is complete\n"
        "==> slurm/100001.log <==\n"
        "0: later\n"
    )


def test_ranks_and_rays_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded("failing", tmp_path)
    (run.directory / "logs").mkdir()
    for rank in (0, 1):
        (run.directory / f"logs/rank-0000{rank}.log").write_text(f"0: rank {rank}\nno end")
    text = printed(run, Selection(rank=1), capsys)
    assert text.splitlines()[1:] == ["0: rank 1", "no end"]
    with pytest.raises(ConfigError, match="^.* has no log of rank 2; there are ranks 0 to 1$"):
        logs(run.directory, Selection(rank=2), follow=False)
    with pytest.raises(ConfigError, match="has no logs of Ray's daemons of node 1: failed attempts' are kept"):
        logs(run.directory, Selection(ray=True, node="1"), follow=False)
    attempt = run.directory / "attempts/88035-0"
    for node in (0, 1):
        (attempt / f"node-{node}.json").write_text(json.dumps({"name": f"f{node + 1}", "host": "elsewhere"}))
        (attempt / f"ray/node-{node}").mkdir(parents=True)
        (attempt / f"ray/node-{node}/raylet.err").write_text(f"raylet of {node}\n")
    assert printed(run, Selection(ray=True, node="f2"), capsys).splitlines()[1:] == ["raylet of 1"]
    both = printed(run, Selection(ray=True), capsys).splitlines()[1:]
    assert both[1::2] == ["raylet of 0", "raylet of 1"]
    assert both[0] == "==> attempts/88035-0/ray/node-0/raylet.err <=="


def test_a_local_run_has_no_job_log(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a local run, which prints to its own terminal; .*rlhpc logs --rank 0"):
        logs(tmp_path, Selection(), follow=False)


def test_a_job_of_an_salloc_shell_prints_there(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "7", "log": None, "submitted": 1.0}))
    with pytest.raises(ConfigError, match="^job 7 prints to the terminal of its salloc shell; .*--rank"):
        logs(tmp_path, Selection(), follow=False)


def test_a_file_that_grows_is_cut_and_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert tail.lines() == []
    path.write_text("one\ntw")
    assert tail.lines() == ["one"]
    with path.open("a") as file:
        file.write("o\nthree\n")
    assert tail.lines() == ["two", "three"] and tail.lines() == []
    path.write_text("cut\n")
    assert tail.lines() == ["cut"]
    rotated = tmp_path / "new"
    rotated.write_text("a file of the same name, longer than the one before\nlast")
    os.replace(rotated, path)
    assert tail.lines() == ["a file of the same name, longer than the one before"]
    assert tail.lines(rest=True) == ["last"] and tail.lines(rest=True) == []


@pytest.mark.parametrize("num_lines", [0, 1, 7, 20_000, 30_000])
def test_the_last_lines_of_a_file_of_several_blocks(tmp_path: Path, num_lines: int) -> None:
    lines = [f"line {number} {'x' * (number % 50)}" for number in range(20_000)]
    path = tmp_path / "log"
    path.write_text("".join(line + "\n" for line in lines))
    tail = Tail(path)
    tail.start_at(num_lines)
    assert tail.lines() == lines[len(lines) - min(num_lines, len(lines)) :]


def test_following_a_run_until_its_end(tmp_path: Path) -> None:
    """The job's end is played by moving the files of the recorded run into place, in the order in which they came."""
    source, run = RECORDED / "runs/requeued", tmp_path / "run"
    (run / "slurm").mkdir(parents=True)
    for name in ("config.yaml", "job.json"):
        shutil.copy(source / name, run)
    lines = JOB_LOG.splitlines(keepends=True)
    log = run / "slurm/88034.log"
    log.write_text("".join(lines[:20]))
    ended = (source / "attempts.jsonl").read_text().splitlines(keepends=True)
    (run / "attempts.jsonl").write_text(ended[0])
    command = [sys.executable, "-m", "rlhpc.cli.main", "logs", "-f", "-n", "3", str(run)]
    environ = {**os.environ, "PATH": str(tmp_path)}  # no Slurm: the run directory alone speaks
    output = tmp_path / "output"
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, env=environ)
    try:
        shutil.copy(source / "progress.json", run / "progress.json.new")
        _wait_for(output, lines[19])
        with log.open("a") as file:
            file.write("".join(lines[20:]))
        (run / "attempts.jsonl").write_text("".join(ended))
        os.replace(run / "progress.json.new", run / "progress.json")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
    text = output.read_text()
    assert text.startswith("".join(lines[17:20]))
    assert [line for line in lines[17:] if line not in text] == []
    assert "== attempt 88034-1 ended: stopped by scontrol requeue; SIGTERM at" in text
    assert text.endswith("== finished\n")


def _wait_for(output: Path, line: str) -> None:
    deadline = time.monotonic() + 60
    while line not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        time.sleep(0.1)
