"""Where the run stands in the prompts: shuffled epochs that can be left and taken up anywhere."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlhpc.errors import DataError


class PromptCursor:
    """Batches of prompt indices over endless epochs; an epoch's incomplete last batch is dropped, as in verl.

    The order of an epoch depends on (seed, epoch) alone: ranks of Philox's raw 64-bit stream, which numpy
    keeps stable between versions. The state is a position; a resumed cursor goes on as if never stopped.
    """

    def __init__(
        self,
        num_prompts: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        *,
        key: str = "data.train_batch_size",
    ) -> None:
        """`key` is the setting that `batch_size` comes from. Raises DataError when an epoch doesn't hold one batch."""
        if batch_size < 1:
            raise DataError(f"{key}={batch_size} must be at least 1")
        if batch_size > num_prompts:
            raise DataError(
                f"{key}={batch_size} exceeds the {num_prompts} prompts of the dataset; "
                f"set {key} to at most {num_prompts} or add prompts"
            )
        self.num_prompts, self.batch_size, self.seed, self.shuffle = num_prompts, batch_size, seed, shuffle
        self.epoch = 0  # of the next batch
        self._batch = 0  # within the epoch, of the next batch
        self._order = self._permutation()

    @property
    def batches_per_epoch(self) -> int:
        return self.num_prompts // self.batch_size

    @property
    def num_batches_drawn(self) -> int:
        return self.epoch * self.batches_per_epoch + self._batch

    def next(self) -> list[int]:
        """The next `batch_size` prompt indices."""
        start = self._batch * self.batch_size
        indices: list[int] = self._order[start : start + self.batch_size].tolist()
        self._seek(self.num_batches_drawn + 1)
        return indices

    def state(self) -> dict[str, int | bool]:
        """JSON-able; `load` takes it."""
        return {"num_batches_drawn": self.num_batches_drawn, **self._identity()}

    def load(self, state: Mapping[str, int | bool]) -> None:
        """Raises DataError, naming each difference, when the state is of other data or another order."""
        differing = [
            f"{key}: checkpoint {state.get(key)}, now {value}"
            for key, value in self._identity().items()
            if state.get(key) != value
        ]
        if differing:
            raise DataError(
                f"the prompt cursor can't resume ({'; '.join(differing)}); restore these settings and files, or begin "
                "anew in another run_dir: resume.from=RUN resume.what=weights takes the weights along"
            )
        self._seek(int(state["num_batches_drawn"]))

    def _identity(self) -> dict[str, int | bool]:
        names = ("num_prompts", "batch_size", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def _seek(self, num_batches_drawn: int) -> None:
        epoch, self._batch = divmod(num_batches_drawn, self.batches_per_epoch)
        if epoch != self.epoch:
            self.epoch = epoch
            self._order = self._permutation()

    def _permutation(self) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_prompts)
        key = np.array([self.seed % 2**64, self.epoch], dtype=np.uint64)
        return np.argsort(np.random.Philox(key=key).random_raw(self.num_prompts), kind="stable")
