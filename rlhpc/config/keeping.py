"""Which checkpoints a run can keep, checked before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from rlhpc.config.schema import RunConfig


def keeping_problems(cfg: RunConfig) -> Iterator[str]:
    """A line for every contradiction among which checkpoints are to be kept and which steps are saved and validated."""
    checkpoint, trainer = cfg.checkpoint, cfg.trainer
    if checkpoint.keep_every and (trainer.save_freq < 1 or checkpoint.keep_every % trainer.save_freq):
        yield (
            f"checkpoint.keep_every={checkpoint.keep_every} must be a multiple of trainer.save_freq={trainer.save_freq}"
            ", the steps that are saved; set one of them accordingly, or keep_every=0"
        )
    if not checkpoint.keep_best:
        if checkpoint.best_metric:
            yield (
                f"checkpoint.best_metric={checkpoint.best_metric} chooses nothing while checkpoint.keep_best=0; "
                "set keep_best to the number of checkpoints, or best_metric=null"
            )
        return
    told = f"checkpoint.keep_best={checkpoint.keep_best}"
    if not (checkpoint.best_metric or "").startswith("val-core/"):
        yield (
            f"{told} ranks by checkpoint.best_metric={checkpoint.best_metric}, which must be a validation metric; "
            "set one that the run logs, such as val-core/<data source>/reward/mean@1"
        )
    for key, every in (("test_freq", trainer.test_freq), ("save_freq", trainer.save_freq)):
        if every < 1:
            yield f"{told} needs steps that are validated and saved; set trainer.{key} (or keep_best=0)"
