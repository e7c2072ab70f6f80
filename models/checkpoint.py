"""Checkpoints: everything a run needs to go on, written beside, checked, then renamed; the newest sound one
is used.

``checkpoints/step_00000080/`` holds torch.distributed.checkpoint's shards (weights and optimizer, readable by
any number of ranks), ``rank_0000.safetensors`` (what each rank alone knows: reference scores in flight,
random state), ``state.json`` (where the run is) and ``manifest.json`` (size and checksum of every file: what
is damaged is found before it is loaded).
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

from data.batches import dealing
from models.checkpoint_reading import CheckpointError, Planner, Reader, reason
from models.distributed import Group, World, any_rank, aside, gather_objects

T = TypeVar("T")
FAILURES = (SafetensorError, OSError, RuntimeError, ValueError)
"""What writing raises where it cannot. Beside them torch's CheckpointException, which is no Exception, stands
for the failure of any rank."""
UNSAID = dealing(packed=False)
"""How rows were dealt in a checkpoint that does not say: one of an earlier version."""
UNSHARED = StagingOptions(
    use_async_staging=False, use_shared_memory=False, use_pinned_memory=False, use_non_blocking_copy=False
)
"""A copy that is done when training goes on."""
_NAME = re.compile(r"step_[0-9]{8,}")

FOREIGN = (TypeError, LookupError, AttributeError)
"""What else reading raises where the files are somebody else's."""


class Checkpoints:
    """The checkpoints of one run. Every method is called by every rank."""

    def __init__(self, folder: Path, world: World, keep: int, behind: bool = False) -> None:
        """``behind``: shards are written by a thread, from a copy in the memory of the CPU, while training
        goes on. A checkpoint is there, as any other, once it is whole; one that a kill cuts off is not."""
        self.folder, self.world, self.keep = folder, world, keep
        self._stager = DefaultStager(UNSHARED) if behind else None
        self._group = aside() if behind else None
        self._writing: Writing | None = None

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def all(self) -> list[Path]:
        """Those that were written whole (or damaged later), oldest first. A folder of another name is
        somebody else's."""
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
        tensors; ``records``, called by rank 0 with the unfinished folder, adds files to it.

        Raises CheckpointError on every rank if any could not write (a full disk); what was there before
        stays, and nothing else does. Where shards are written behind, ``finish`` raises what becomes known
        later, and is called first: one is written at a time.
        """
        self.finish()
        part = self.folder / f"step_{step:08d}.part"

        def prepare() -> dict[str, Any]:
            if self.world.is_main:
                shutil.rmtree(part, ignore_errors=True)
                part.mkdir(parents=True)
            return _tensors(policy, optimizer)

        def write() -> None:
            save_file(mine | {"rng": torch.get_rng_state()}, part / f"rank_{self.world.rank:04d}.safetensors")
            if self.world.is_main:
                records(part)
                about = state | {"fresh_optimizer": not optimizer.state}
                (part / "state.json").write_text(json.dumps(about, indent=2))

        stager = self._stager
        with self._whole_or_not_at_all(part, step):
            tensors = everywhere(prepare)
            if stager is None:
                everywhere(lambda: dcp.save(tensors, checkpoint_id=part))
                everywhere(write)  # a rank that still writes has unfinished files in the folder
                self._seal(part, step)
            else:
                everywhere(write)  # of this moment, as the copy is
                staged = everywhere(lambda: stager.stage(tensors))
                self._writing = Writing(lambda: self._write_behind(part, step, staged))

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if one is. Raises CheckpointError, as ``save``."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_behind(self, part: Path, step: int, staged: Any) -> None:
        group = self._group
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
            raise CheckpointError(f"checkpoint {self.path(step)} could not be written: {error}") from error

    def _seal(self, part: Path, step: int) -> None:
        """Add up the files, rename the folder into place, forget the oldest."""
        group = self._group
        sums = gather_objects(everywhere(lambda: _checksums(part, self.world.rank), group=group), group)
        files = {name: value for of_rank in sums for name, value in of_rank.items()}
        everywhere(lambda: self._publish(part, step, files) if self.world.is_main else None, group=group)
        if self.world.is_main:
            self._forget()

    def _publish(self, part: Path, step: int, files: dict[str, Any]) -> None:
        """Rename the finished checkpoint into place."""
        (part / "manifest.json").write_text(json.dumps(files, indent=2, sort_keys=True))
        shutil.rmtree(self.path(step), ignore_errors=True)
        part.rename(self.path(step))

    def _forget(self) -> None:
        """Remove the oldest but the best. One that cannot be removed stays, and is tried again after the next
        save."""
        for old in set(self.all()[: -self.keep]) - {self.best()}:
            try:
                shutil.rmtree(old)
            except OSError as error:
                print(f"{old}: an old checkpoint could not be removed ({error})", flush=True)

    def best(self) -> Path | None:
        """The checkpoint with the highest "score" in its state; None where none has one. One whose state is
        damaged has none."""
        scored: dict[Path, float] = {}
        for path in self.all():
            try:
                score = json.loads((path / "state.json").read_text()).get("score")
            except (OSError, ValueError):
                continue
            if score is not None:
                scored[path] = score
        return max(scored, key=lambda path: scored[path]) if scored else None

    def newest_sound(self) -> Path | None:
        """The newest checkpoint whose every file is as it was written; says which it passes over. None if
        there is none."""
        for path in reversed(self.all()):
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
        """What is wrong with this rank's share of a checkpoint's files, or nothing."""
        try:
            files = json.loads((path / "manifest.json").read_text())
            for name in sorted(files)[self.world.rank :: self.world.size]:
                if _checksum(path / name) != files[name]:
                    return f"{name} is not as it was written"
        except (OSError, ValueError) as error:
            return str(error)
        return ""

    def load(
        self, path: Path, policy: nn.Module, optimizer: torch.optim.Optimizer, dealing: str | None = None
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Put weights and optimizer back; returns (state, this rank's own tensors). Where the rows were dealt
        to the ranks in another way than ``dealing`` (data.batches.dealing; None: whichever way), the other
        ranks' tensors beside them; written by more or fewer ranks than there are now, the tensors of all of
        them, without random state. Raises CheckpointError, on every rank."""
        state: dict[str, Any] = everywhere(lambda: json.loads((path / "state.json").read_text()), path)
        saved = everywhere(lambda: _tensors(policy, optimizer, fresh=state["fresh_optimizer"]), path)
        _read_shards(path, saved)
        set_model_state_dict(
            policy, saved["model"], options=StateDictOptions(ignore_frozen_params=True, strict=False)
        )
        if "optimizer" in saved:
            set_optimizer_state_dict(policy, optimizer, saved["optimizer"])
        alike = dealing in (None, state.get("dealing", UNSAID))
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
        """Put the weights alone back, for export. Raises CheckpointError."""
        saved = {"model": get_model_state_dict(policy, options=StateDictOptions(ignore_frozen_params=True))}
        _read_shards(path, saved)
        set_model_state_dict(
            policy, saved["model"], options=StateDictOptions(ignore_frozen_params=True, strict=False)
        )


class Writing(Thread):
    """What a thread does beside the training. The process need not wait for it to end."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.work = work
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # raised where it is waited for
            self.error = error

    def result(self) -> None:
        """Wait for it. Raises what it raised."""
        self.join()
        if self.error is not None:
            raise self.error


def everywhere(work: Callable[[], T], path: Path | None = None, group: Group | None = None) -> T:
    """What ``work`` gives on this rank, once every rank has done it. Raises CheckpointError on every rank
    where it failed on any, with what went wrong there; ``path`` is what could not be loaded; ``group``: as of
    ``gather_objects``."""
    value, problem = None, ""
    try:
        value = work()
    except CheckpointError as error:
        problem = str(error)
    except CheckpointException as error:
        if any(not isinstance(cause, Exception) for cause, _ in error.failures.values()):
            raise  # asked to stop, on some rank
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


def _read_shards(path: Path, saved: dict[str, Any]) -> None:
    """Fill ``saved`` from the checkpoint's shards, as data. Raises CheckpointError, on every rank."""
    reader = everywhere(lambda: Reader(path), path)
    everywhere(lambda: dcp.load(saved, storage_reader=reader, planner=Planner()), path)


def _tensors(
    policy: nn.Module, optimizer: torch.optim.Optimizer, fresh: bool | None = None
) -> dict[str, Any]:
    """What goes into the shards: the trained weights (frozen ones are the initial model's) and the optimizer.
    A fresh optimizer has no state, and asking for it would make torch step it once: it is left out."""
    fresh = not optimizer.state if fresh is None else fresh
    tensors: dict[str, Any] = {
        "model": get_model_state_dict(policy, options=StateDictOptions(ignore_frozen_params=True))
    }
    return tensors if fresh else tensors | {"optimizer": get_optimizer_state_dict(policy, optimizer)}


def _checksum(path: Path) -> list[int]:
    """[bytes, crc32] of a file."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def _checksums(part: Path, rank: int) -> dict[str, list[int]]:
    """Those of the files that this rank wrote; rank 0 has all that are no rank's own."""
    names = [p for p in part.iterdir() if p.name.startswith((f"__{rank}_", f"rank_{rank:04d}"))]
    if rank == 0:
        names += [p for p in part.iterdir() if not p.name.startswith(("__", "rank_"))]
    return {p.name: _checksum(p) for p in names}
