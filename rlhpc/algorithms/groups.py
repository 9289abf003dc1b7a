"""Which groups of samples a step trains on: all that are drawn, or those that a group baseline learns from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rlhpc.data.types import Trajectory
from rlhpc.errors import ExhaustedError

# What a group's samples are compared by, under verl's names. `seq_final_reward` is less an in-reward KL too, under
# which no two samples are alike: with algorithm.use_kl_in_reward it is refused.
METRICS: dict[str, Callable[[Trajectory], float]] = {
    "acc": lambda trajectory: trajectory.score,
    "score": lambda trajectory: trajectory.score,
    "reward": lambda trajectory: trajectory.reward,
    "seq_reward": lambda trajectory: trajectory.reward,
    "seq_final_reward": lambda trajectory: trajectory.reward,
}
FEWEST_BATCHES = 10  # that a step may be sampled in where no limit is set, however short an epoch is


class Groups:
    """The groups of one step, `n` consecutive trajectories each, until there are `wanted`. Keeps every one."""

    def __init__(self, wanted: int, n: int) -> None:
        self._wanted, self._n = wanted, n
        self._kept: list[Trajectory] = []
        self.num_batches = 0  # added so far

    @property
    def full(self) -> bool:
        return len(self._kept) >= self._wanted * self._n

    @property
    def trajectories(self) -> list[Trajectory]:
        """Of the first `wanted` groups that were kept."""
        return self._kept[: self._wanted * self._n]

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """One generation batch: whole groups."""
        self.num_batches += 1
        self._kept += trajectories


class VaryingGroups(Groups):
    """DAPO's dynamic sampling (arXiv 2503.14476 section 3.2): drops groups whose samples are all alike by a metric, for
    they have no advantage, and wants further prompts instead. As in verl 0.9 (recipe/dapo) groups beyond the wanted
    ones are dropped too; the metrics count both."""

    def __init__(self, wanted: int, n: int, *, metric: str, max_batches: int) -> None:
        super().__init__(wanted, n)
        self._metric, self._value, self._max_batches = metric, METRICS[metric], max_batches
        self._alike: Counter[float] = Counter()  # groups dropped, by the value that all of their samples have
        self._num_sampled = self._num_failed = 0
        self._sum = 0.0

    def add(self, trajectories: Sequence[Trajectory]) -> None:
        """Raises ExhaustedError where this was the last of `max_batches` and groups are still missing."""
        self.num_batches += 1
        self._num_sampled += len(trajectories)
        self._num_failed += sum(trajectory.reward_status != "ok" for trajectory in trajectories)
        self._sum += sum(trajectory.score for trajectory in trajectories)
        for begin in range(0, len(trajectories), self._n):
            group = trajectories[begin : begin + self._n]
            values = {self._value(trajectory) for trajectory in group}
            if len(values) > 1:
                self._kept += group
            else:
                self._alike[values.pop()] += 1
        if not self.full and self.num_batches >= self._max_batches:
            raise ExhaustedError(self._told())

    @property
    def metrics(self) -> dict[str, float]:
        """Of all that was sampled for the step; `samples` are groups, as in verl's names. Solved are those all alike
        with a metric above 0."""
        groups = self._num_sampled // self._n
        alike = sum(self._alike.values())
        solved = sum(count for value, count in self._alike.items() if value > 0)
        prefix = "training/filter_groups"
        return {
            "train/num_gen_batches": self.num_batches,
            f"{prefix}/evicted_samples": alike,
            f"{prefix}/discarded_surplus_samples": groups - alike - self._wanted,
            f"{prefix}/solved_ratio": solved / groups,
            f"{prefix}/unsolved_ratio": (alike - solved) / groups,
            f"{prefix}/sampled_score/mean": self._sum / self._num_sampled,
            f"{prefix}/failed_reward_ratio": self._num_failed / self._num_sampled,
        }

    def _told(self) -> str:
        found, num_prompts = len(self._kept) // self._n, self._num_sampled // self._n
        alike = ", ".join(f"{count} at {value:g}" for value, count in self._alike.most_common(3)) or "none"
        failed = f"; {self._num_failed} of {self._num_sampled} rewards failed" if self._num_failed else ""
        return (
            f"only {found} of data.train_batch_size={self._wanted} groups have answers that differ in "
            f"{self._metric}, after {num_prompts} prompts in {self.num_batches} batches, the most for a step "
            "(algorithm.filter_groups.max_num_gen_batches; 0: an epoch's, at least 10). Groups all alike: "
            f"{alike}{failed}. Give "
            "prompts that the model solves sometimes, neither never nor always; or raise actor_rollout_ref.rollout.n, "
            "its temperature, or max_num_gen_batches; or set algorithm.filter_groups.enable=false. Another run_dir "
            "takes the state over with resume.from, with resume.what=weights where the prompts are others"
        )
