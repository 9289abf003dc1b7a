"""What is known of a run's data before it starts."""

import json

import pytest

from rlhpc.config.checks import check_run
from rlhpc.config.load import load
from rlhpc.errors import DataError


def test_a_job_doesnt_wait_to_learn_that_its_columns_are_of_no_known_form(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (tmp_path / "train.jsonl").write_text('\n{"text": "1 + 1?"}\n')
    data = {"train_files": str(tmp_path / "train.jsonl")}
    with pytest.raises(
        DataError, match=r"data\.train_files: .*train\.jsonl:2: columns \['text'\] are of no known form"
    ):
        check_run(load({"actor_rollout_ref": {"model": {"path": str(tmp_path)}}, "data": data}))
