"""Log-probabilities on disk, so that every later run that starts from the same weights reads them instead of
scoring again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import StoppedError
from common.files import on_disk
from models.score_table import Shard, packed

Shards = dict[str, Shard]
"""File name -> its scores"""
LAYOUT = "keys, ends, values"
"""Part of the digest that names a folder: other versions lay out their files differently."""


class ScoreCache:
    """Shards of scores, written as they are computed to ``<root>/scores/<digest of parts>/*.safetensors``.
    Each has a checksum of its contents and of what they depend on. Any number of processes may use a folder
    at once."""

    def __init__(self, root: Path, parts: dict[str, str], rank: int) -> None:
        """``parts``: everything that a score depends on."""
        self.parts, self.rank = parts | {"layout": LAYOUT}, rank
        self.key = hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()[:24]
        self.folder = root / "scores" / self.key

    def shards(self) -> Shards:
        """Return every shard written so far, of any rank. A shard that is not as it was written is reported
        and removed; its rows are scored again."""
        found: Shards = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name.startswith("."):  # one that is being written
                continue
            try:
                found[path.name] = self._read(path)
            except FileNotFoundError:  # removed by another rank
                continue
            except (SafetensorError, OSError, ValueError) as error:
                print(f"{path}: removed, its rows are scored again: {error}", flush=True)
                with contextlib.suppress(OSError):  # a folder of that name
                    path.unlink()
        return found

    def _read(self, path: Path) -> Shard:
        with safe_open(path, framework="numpy") as file:  # reads a copy, which is dropped once it is checked
            known = (file.metadata() or {}).get("sha256")
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if known is None:
            raise ValueError("it has no checksum")
        if known != self._digest(found):
            raise ValueError("it is damaged, its checksum is another")
        with safe_open(path, framework="pt") as file:  # values stay in the file
            return {name: file.get_tensor(name) for name in found}

    def write(self, scores: dict[str, Tensor]) -> None:
        """Write one more shard under a temporary name, then rename it. Raises StoppedError where it cannot be
        written."""
        shard = packed(scores)
        name = f"{self.rank:04d}-{uuid4().hex}.safetensors"  # a process id may occur on another node too
        part = self.folder / f".{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (about := self.folder / "about.json").exists():
                part.write_text(json.dumps(self.parts, indent=2, sort_keys=True))
                os.replace(part, about)  # if several write at once, one file stays: they are equal
            digest = self._digest({name: values.numpy() for name, values in shard.items()})
            save_file(shard, part, metadata={"sha256": digest})
            os.replace(part, self.folder / name)
        except (SafetensorError, OSError) as error:
            with contextlib.suppress(OSError):  # cache_dir, or a part of it, is no folder
                part.unlink()
            said = f"{self.folder}: scores cannot be written ({error}) {on_disk(self.folder)}; "
            said += "make room, or name another cache_dir"
            if self.rank:
                print(f"rank {self.rank}: {said}", flush=True)  # programs print only rank 0's errors
            raise StoppedError(said) from error

    def _digest(self, shard: Mapping[str, np.ndarray]) -> str:
        """Return the checksum of the key and every score, 64 hex digits: the file format has none of its
        own."""
        digest = hashlib.sha256(self.key.encode())
        for name in sorted(shard):
            digest.update(f"\n{name} {shard[name].shape} {shard[name].dtype}\n".encode())
            digest.update(np.ascontiguousarray(shard[name]).data)
        return digest.hexdigest()
