"""Checkpoints: everything a run needs to go on, written beside, checked, then renamed; the newest sound one is used.

``checkpoints/step_00000080/`` holds torch.distributed.checkpoint's shards (weights and optimizer, readable by any number of ranks),
``rank_0000.safetensors`` (what each rank alone knows: reference scores in flight, random state), ``state.json`` (where the run is) and
``manifest.json`` (size and checksum of every file: what is damaged is found before it is loaded).
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from common.errors import StoppedError
from models.distributed import World, any_rank, barrier, gather_objects

_NAME = re.compile(r"step_[0-9]{8,}")


class CheckpointError(StoppedError):
    """A checkpoint that could not be written, or none that can be read; the message says what and why."""


class Checkpoints:
    """The checkpoints of one run. Every method is called by every rank."""

    def __init__(self, folder: Path, world: World, keep: int) -> None:
        self.folder, self.world, self.keep = folder, world, keep

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def all(self) -> list[Path]:
        """Those that were written whole (or damaged later), oldest first. A folder of another name is somebody else's."""
        return sorted(p for p in self.folder.glob("step_*") if _NAME.fullmatch(p.name) and p.is_dir())

    def save(
        self,
        step: int,
        policy: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict[str, Any],
        mine: dict[str, Tensor],
    ) -> None:
        """Write the checkpoint before ``step``. ``state`` (JSON) is rank 0's; ``mine`` are this rank's own tensors.

        Raises CheckpointError on every rank if any could not write (a full disk); what was there before stays.
        """
        part, error = self.folder / f"step_{step:08d}.part", ""
        if self.world.is_main:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        barrier()
        try:
            dcp.save(_tensors(policy, optimizer), checkpoint_id=part)
            save_file(mine | {"rng": torch.get_rng_state()}, part / f"rank_{self.world.rank:04d}.safetensors")
            if self.world.is_main:
                (part / "state.json").write_text(
                    json.dumps(state | {"fresh_optimizer": not optimizer.state}, indent=2)
                )
        except (OSError, RuntimeError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        sums = gather_objects(("" if error else _checksums(part, self.world.rank), error))
        problem = next((e for _, e in sums if e), "")
        if not problem and self.world.is_main:
            problem = self._publish(
                part, step, {name: value for files, _ in sums for name, value in files.items()}
            )
        if any_rank(bool(problem)):
            if self.world.is_main:
                shutil.rmtree(part, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {self.path(step)} could not be written: {problem or 'another rank failed'}"
            )

    def _publish(self, part: Path, step: int, files: dict[str, Any]) -> str:
        """Rename the finished checkpoint into place and remove the oldest but the best; returns what went wrong."""
        try:
            (part / "manifest.json").write_text(json.dumps(files, indent=2, sort_keys=True))
            shutil.rmtree(self.path(step), ignore_errors=True)
            part.rename(self.path(step))
            for old in set(self.all()[: -self.keep]) - {self.best()}:
                shutil.rmtree(old)
        except (OSError, ValueError) as failure:
            return str(failure)
        return ""

    def best(self) -> Path | None:
        """The checkpoint with the highest "score" in its state; None where none has one. One whose state is damaged has none."""
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
        """The newest checkpoint whose every file is as it was written; says which it passes over. None if there is none."""
        for path in reversed(self.all()):
            problem = self.problem(path)
            if not any_rank(bool(problem)):
                return path
            print(
                f"rank {self.world.rank}: {path} is damaged ({problem or 'seen by another rank'}); trying the one before",
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
        self, path: Path, policy: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Put weights and optimizer back; returns (state, this rank's own tensors). Written by other ranks than there are now: the
        tensors of all of them together, without random state."""
        state = json.loads((path / "state.json").read_text())
        saved = _tensors(policy, optimizer, fresh=state["fresh_optimizer"])
        dcp.load(saved, checkpoint_id=path)
        set_model_state_dict(
            policy, saved["model"], options=StateDictOptions(ignore_frozen_params=True, strict=False)
        )
        if "optimizer" in saved:
            set_optimizer_state_dict(policy, optimizer, saved["optimizer"])
        files = sorted(path.glob("rank_*.safetensors"))
        if len(files) == self.world.size:
            mine = load_file(files[self.world.rank])
            torch.set_rng_state(mine.pop("rng"))
            return state, mine
        together: dict[str, Tensor] = {}
        for file in files:
            together |= load_file(file)
        together.pop("rng", None)
        return state, together

    def load_weights(self, path: Path, policy: nn.Module) -> None:
        """Put the weights alone back, for export."""
        saved = {"model": get_model_state_dict(policy, options=StateDictOptions(ignore_frozen_params=True))}
        dcp.load(saved, checkpoint_id=path)
        set_model_state_dict(
            policy, saved["model"], options=StateDictOptions(ignore_frozen_params=True, strict=False)
        )


def _tensors(
    policy: nn.Module, optimizer: torch.optim.Optimizer, fresh: bool | None = None
) -> dict[str, Any]:
    """What goes into the shards: the trained weights (frozen ones are the initial model's) and the optimizer. A fresh optimizer has no
    state, and asking for it would make torch step it once: it is left out."""
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
    """Those of the files that this rank wrote."""
    names = [p for p in part.iterdir() if p.name.startswith((f"__{rank}_", f"rank_{rank:04d}"))]
    if rank == 0:
        names += [part / "state.json", part / ".metadata"]
    return {p.name: _checksum(p) for p in names}
