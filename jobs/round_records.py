"""The records of a run's rounds, on every rank: rank 0 alone reads and writes ``round.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import StoppedError
from common.progress import phase
from common.worker_process import WorkerError
from config.schema import Config
from jobs.run_folder import run_id
from models.distributed import ShareError, on_main
from reports.metrics import read_metrics
from rollouts.ledger import RoundFolder
from rollouts.rewards.base import RewardError
from trainers.dealing import Progress


class RoundRecords:
    """The rounds of the run in ``folder``. Every rank makes the same calls and gets the same."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder, self.config, self.run = folder, config, on_main(lambda: run_id(folder))

    def round(self, index: int) -> RoundFolder:
        path, compress = self.folder / "rounds" / f"{index:03d}", self.config.rounds.compress
        return RoundFolder(path, compress, self.run)

    def check(self, seals: Mapping[str, str], at: Progress) -> None:
        """Raise DataError unless each round that was there before the checkpoint ``at`` is as it was.
        ``seals``: round -> the seal of its record, of rounds that were finished by then."""
        inside = at.position > 0
        there = at.segment + inside + self.config.rounds.lag * (inside or at.segment > 0)
        with phase("compare the rounds with their checksums", "rounds.contexts"):
            for index in range(there):
                if self.first(index) < self.config.rounds.contexts:
                    on_main(partial(self.round(index).check, seals.get(str(index))))

    def first(self, index: int) -> int:
        """Return the round's first context, which is where the previous round ended; the number of planned
        contexts if that does not exist."""
        if index == 0:
            return 0
        planned = self.config.rounds.contexts
        return on_main(lambda: int(self.round(index - 1).record.get("contexts", [0, planned])[1]))

    def trained(self, index: int) -> int:
        """Return the number of examples that the rounds before ``index`` gave."""
        return on_main(lambda: sum(int(self.round(i).record["examples"]) for i in range(index)))

    def note(self, index: int, facts: dict[str, Any]) -> None:
        """Add ``facts`` to the round's record."""
        on_main(lambda: self.round(index).note(facts))

    def close(self, index: int) -> str:
        """Record the steps that were trained on the round. Return the seal of the record, which stays as it
        is from now on."""
        return on_main(lambda: self._closed(index))

    def _closed(self, index: int) -> str:
        own = self.round(index)
        if "examples" not in own.record:
            raise own.not_as_written(own.path / "round.json", "it is gone")
        lines = read_metrics(self.folder / "metrics.jsonl")
        own.note({"steps": sum(line.get("round") == index for line in lines)})
        return own.seal


@contextmanager
def stopping(index: int) -> Iterator[None]:
    """Raise StoppedError, which says what to do, where round ``index`` cannot be sampled or scored."""
    try:
        yield
    except (WorkerError, RewardError, ShareError) as error:
        goes_on = "the same command with resume=true goes on with this round"
        if isinstance(error, RewardError):
            goes_on += ", and says what accepts changed code; changed settings need a new run (exp_name)"
        raise StoppedError(f"round {index}: {error}\n{goes_on}") from error
