"""Checkpoints with everything a run needs to continue, written under a temporary name, checked, then renamed;
a run uses the newest sound one.

``checkpoints/step_00000080/`` holds the shards of torch.distributed.checkpoint (weights and optimizer,
readable by any number of ranks), ``rank_0000.safetensors`` (state that one rank alone has: reference scores
in use, random state), ``state.json`` (the position of the run) and ``manifest.json`` (size and checksum of
every file, so that damage is found before loading).
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from common.errors import StoppedError
from common.files import on_disk, read_json, regular_file
from models.checkpoint_reading import Planner, Reader
from models.distributed import (
    Group,
    World,
    any_rank,
    from_main,
    gather_objects,
    long_timeout_group,
    side_group,
)

T = TypeVar("T")
FAILURES = (SafetensorError, OSError, RuntimeError, ValueError)
"""Exceptions that a failed write raises. In addition torch's CheckpointException, which is not an Exception,
stands for the failure of any rank."""
UNSHARED = StagingOptions(
    use_async_staging=False, use_shared_memory=False, use_pinned_memory=False, use_non_blocking_copy=False
)
"""Options of a copy that is complete when training goes on."""
ALWAYS = frozenset([".metadata", "state.json"])
"""Files that every checkpoint has."""
_NAME = re.compile(r"step_[0-9]{8,}")

FOREIGN = (TypeError, LookupError, AttributeError)
"""Further exceptions that reading raises where the files are somebody else's."""


class CheckpointError(StoppedError):
    """A checkpoint that could not be written, or none that can be read; the message says what and why."""


class Checkpoints:
    """The checkpoints of one run. Every method is called by every rank."""

    def __init__(self, folder: Path, world: World, keep: int, behind: bool = False) -> None:
        """``behind``: a thread writes the shards from a copy in CPU memory while training goes on. Such a
        checkpoint exists, as any other, only once it is complete; one that a kill interrupts does not."""
        self.folder, self.world, self.keep = folder, world, keep
        self._behind = behind
        self._group = side_group() if behind else long_timeout_group()
        self._writing: Writing | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def all(self) -> list[Path]:
        """Return the checkpoints that were written completely (some may be damaged since), oldest first.
        Folders with other names are somebody else's."""
        return sorted(p for p in self.folder.glob("step_*") if _NAME.fullmatch(p.name) and p.is_dir())

    def save(
        self,
        step: int,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        mine: dict[str, Tensor],
        records: Callable[[Path], None] = lambda part: None,
    ) -> None:
        """Write the checkpoint before ``step``. ``state`` (JSON) is rank 0's; ``mine`` are this rank's own
        tensors; rank 0 calls ``records`` with the unfinished folder to add files to it.

        Raises CheckpointError on every rank if any rank could not write (a full disk); earlier checkpoints
        stay, and nothing of this one does. Only one checkpoint is written at a time, so ``save`` calls
        ``finish`` first. With ``behind``, ``finish`` raises the errors that become known later.
        """
        self.finish()
        part = self.folder / f"step_{step:08d}.part"

        def prepare() -> dict[str, Any]:
            if self.world.is_main:
                self.remove_unfinished()
                part.mkdir(parents=True)
            return _tensors(policy, optimizer)

        def write() -> None:
            save_file(mine | {"rng": torch.get_rng_state()}, part / f"rank_{self.world.rank:04d}.safetensors")
            if self.world.is_main:
                records(part)
                about = state | {"fresh_optimizer": not optimizer.state}
                (part / "state.json").write_text(json.dumps(about, indent=2))

        with self._whole_or_not_at_all(part, step):
            tensors = everywhere(prepare)
            if not self._behind:
                everywhere(lambda: dcp.save(tensors, checkpoint_id=part, process_group=self._group))
                everywhere(write)  # a rank that still writes has unfinished files in the folder
                self._seal(part, step)
            else:
                everywhere(write)  # the state of this moment, like the copy's
                # A stager for each: torch 2.11 closes its own after a copy.
                staged = everywhere(lambda: DefaultStager(UNSHARED).stage(tensors))
                self._writing = Writing(lambda: self._write_behind(part, step, staged))

    def remove_unfinished(self) -> None:
        """Remove what killed saves left; only rank 0 of a run that holds its folder may call it, between
        saves."""
        for left in self.folder.glob("step_*.part"):
            shutil.rmtree(left, ignore_errors=True)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one. Raises CheckpointError, as
        ``save``."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_behind(self, part: Path, step: int, staged: Any) -> None:
        group = self._group
        if self.world.device.type == "cuda":
            # torch's writer waits for the GPU of its thread, which is the first of the node if none is set.
            # Every rank would open a context there, of half a GiB.
            torch.cuda.set_device(self.world.device)
        with self._whole_or_not_at_all(part, step):
            everywhere(lambda: dcp.save(staged, checkpoint_id=part, process_group=group), group=group)
            self._seal(part, step)

    @contextmanager
    def _whole_or_not_at_all(self, part: Path, step: int) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if self.world.is_main:
                shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {self.path(step)} could not be written: {error} {on_disk(part)}"
            ) from error

    def _seal(self, part: Path, step: int) -> None:
        """Collect the checksums of the files, rename the folder into place and remove the oldest
        checkpoints."""
        group = self._group
        sums = gather_objects(everywhere(lambda: _checksums(part, self.world.rank), group=group), group)
        files = {name: value for of_rank in sums for name, value in of_rank.items()}
        everywhere(lambda: self._publish(part, step, files) if self.world.is_main else None, group=group)
        if self.world.is_main:
            self._forget()

    def _publish(self, part: Path, step: int, files: dict[str, Any]) -> None:
        """Write the manifest and rename the finished checkpoint into place."""
        (part / "manifest.json").write_text(json.dumps(files, indent=2, sort_keys=True))
        shutil.rmtree(self.path(step), ignore_errors=True)
        part.rename(self.path(step))

    def _forget(self) -> None:
        """Remove all but the newest ``keep`` checkpoints and the best one. One that cannot be removed stays,
        and is tried again after the next save."""
        for old in set(self.all()[: -self.keep]) - {self.best()}:
            shutil.rmtree(old, ignore_errors=True)

    def best(self) -> Path | None:
        """Return the checkpoint whose state has the highest ``score``, or None where none has a score. A
        checkpoint whose state is damaged has no score."""
        scored: dict[Path, float] = {}
        for path in self.all():
            try:
                score = self.score(read_json(path / "state.json"))
            except (OSError, ValueError, *FOREIGN):
                continue
            if isinstance(score, int | float):
                scored[path] = score
        return max(scored, key=lambda path: scored[path]) if scored else None

    def score(self, state: dict[str, Any]) -> float | None:
        """Return the score of a checkpoint with this state, higher is better; None where it has none."""
        return state.get("score")

    def newest_sound(self) -> Path | None:
        """Return the newest checkpoint whose every file is as it was written, or None if there is none. Print
        which checkpoints are passed over."""
        for path in reversed(from_main(self.all())):  # of a network's folder, ranks may see different lists
            problem = self.problem(path)
            if not any_rank(bool(problem)):
                return path
            print(
                f"rank {self.world.rank}: {path} is damaged ({problem or 'seen by another rank'}); trying "
                "the one before",
                flush=True,
            )
        return None

    def problem(self, path: Path) -> str:
        """Return what is wrong with this rank's share of a checkpoint's files, or an empty string."""
        try:
            files = read_json(path / "manifest.json")
            if not isinstance(files, dict) or not files.keys() >= ALWAYS:
                return f"manifest.json does not list {' and '.join(sorted(ALWAYS))}"
            for name in sorted(files)[self.world.rank :: self.world.size]:
                if _checksum(path / name) != files[name]:
                    return f"{name} is not as it was written"
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def load(
        self, path: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, dealing: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Restore weights and optimizer; return (state, this rank's own tensors). The tensors of the other
        ranks are included where the rows were dealt to the ranks in another way than ``dealing``
        (data.batches.dealing; None: any way). If the checkpoint was written by more or fewer ranks than there
        are now, the tensors are those of all its ranks, without random state. Raises CheckpointError on every
        rank."""
        state: dict[str, Any] = everywhere(lambda: read_json(path / "state.json"), path)
        saved = everywhere(lambda: _tensors(policy, optimizer, fresh=state["fresh_optimizer"]), path)
        _fill(path, saved, policy)
        if "optimizer" in saved:
            set_optimizer_state_dict(policy, optimizer, saved["optimizer"])
        alike = dealing in (None, state.get("dealing"))
        return state, everywhere(lambda: self._load_mine(path, alike), path)

    def _load_mine(self, path: Path, alike: bool) -> dict[str, Tensor]:
        files = sorted(path.glob("rank_*.safetensors"))
        mine: dict[str, Tensor] = {}
        if len(files) == self.world.size:
            mine = load_file(files[self.world.rank])
            torch.set_rng_state(mine.pop("rng"))
            if alike:
                return mine
        together: dict[str, Tensor] = {}
        for file in files:
            together |= load_file(file)
        together.pop("rng", None)
        return together | mine

    def load_weights(self, path: Path, policy: nn.Module) -> None:
        """Restore the weights alone, for export. Raises CheckpointError."""
        saved = {"model": get_model_state_dict(policy, options=StateDictOptions(ignore_frozen_params=True))}
        _fill(path, saved, policy)


class Writing(Thread):
    """Thread that runs ``work`` beside the training. The process need not wait for it to end."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.work = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # ``result`` raises it
            self.error = error

    def result(self) -> None:
        """Wait for the thread to end. Raises what ``work`` raised."""
        self.join()
        if self.error is not None:
            raise self.error


def everywhere(work: Callable[[], T], path: Path | None = None, group: Group | None = None) -> T:
    """Return the result of ``work`` on this rank, once every rank has done it. Raises CheckpointError on
    every rank if it failed on any, with the reason; ``path``: what could not be loaded; ``group``: as for
    ``gather_objects``."""
    value, problem = None, ""
    try:
        value = work()
    except CheckpointError as error:
        problem = str(error)
    except CheckpointException as error:
        if any(not isinstance(cause, Exception) for cause, _ in error.failures.values()):
            raise  # some rank was asked to stop
        problem = reason(error)
    except FAILURES as error:
        problem = reason(error)
    except FOREIGN as error:
        if path is None:
            raise
        problem = reason(error)
    problems = [text for text in gather_objects(problem, group) if text]
    if problems:
        raise CheckpointError(problems[0] if path is None else f"{path} cannot be loaded: {problems[0]}")
    return cast(T, value)


def reason(error: BaseException) -> str:
    """Return one line about a failed save or load; for torch's CheckpointException, the failure of the lowest
    rank."""
    failures: dict[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
    for rank, (cause, _) in sorted(failures.items()):
        return f"rank {rank}: {reason(cause)}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def _fill(path: Path, saved: dict[str, Any], policy: nn.Module) -> None:
    """Fill ``saved`` from the checkpoint's shards, read as data, and the policy's weights from it. Raises
    CheckpointError on every rank."""
    group = long_timeout_group()
    everywhere(
        lambda: dcp.load(saved, storage_reader=Reader(path), planner=Planner(), process_group=group), path
    )
    set_model_state_dict(
        policy, saved["model"], options=StateDictOptions(ignore_frozen_params=True, strict=False)
    )


def _tensors(
    policy: nn.Module, optimizer: torch.optim.Optimizer, fresh: bool | None = None
) -> dict[str, Any]:
    """Return the contents of the shards: the trained weights (frozen ones are the initial model's) and the
    optimizer. A fresh optimizer has no state and is left out: asking for its state would make torch step it
    once."""
    fresh = not optimizer.state if fresh is None else fresh
    tensors: dict[str, Any] = {
        "model": get_model_state_dict(policy, options=StateDictOptions(ignore_frozen_params=True))
    }
    return tensors if fresh else tensors | {"optimizer": get_optimizer_state_dict(policy, optimizer)}


def _checksum(path: Path) -> list[int]:
    """[bytes, crc32] of a file."""
    crc = 0
    with regular_file(path).open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _checksums(part: Path, rank: int) -> dict[str, list[int]]:
    """Return the checksums of the files that this rank wrote; rank 0 adds those of files that belong to no
    rank."""
    names = [p for p in part.iterdir() if p.name.startswith((f"__{rank}_", f"rank_{rank:04d}"))]
    if rank == 0:
        names += [p for p in part.iterdir() if not p.name.startswith(("__", "rank_"))]
    return {p.name: _checksum(p) for p in names}
