"""Log-probabilities on disk: what was scored once under some weights is read by every later run that starts
from them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import StoppedError

Shards = dict[str, dict[str, Tensor]]
"""Name of a file -> its scores"""


class ScoreCache:
    """Shards written as they come, ``<root>/scores/<digest of parts>/*.safetensors``, each with a checksum of
    what it holds and of what that depends on. Any number of processes may use a folder at once."""

    def __init__(self, root: Path, parts: dict[str, str], rank: int) -> None:
        """``parts``: all that a score depends on."""
        self.key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
        self.folder = root / "scores" / self.key
        self.parts, self.rank = parts, rank

    def shards(self) -> Shards:
        """Every shard written so far, of any rank. One that is not as it was written is said, and removed:
        its rows are scored again."""
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
                path.unlink(missing_ok=True)
        return found

    def _read(self, path: Path) -> dict[str, Tensor]:
        with safe_open(path, framework="pt") as file:
            known = (file.metadata() or {}).get("sha256")
            scores = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if known is None:
            raise ValueError("it has no checksum")
        if known != self._digest(scores):
            raise ValueError("it is damaged, its checksum is another")
        return scores

    def write(self, scores: dict[str, Tensor]) -> None:
        """One more shard: written beside, then renamed. Raises StoppedError where that cannot be."""
        scores = {key: values.float().cpu().contiguous() for key, values in scores.items()}
        name = f"{self.rank:04d}-{uuid4().hex}.safetensors"  # a process number may be another node's too
        part = self.folder / f".{name}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (about := self.folder / "about.json").exists():
                part.write_text(json.dumps(self.parts, indent=2, sort_keys=True))
                os.replace(part, about)  # of several at once one stays: they say the same
            save_file(scores, part, metadata={"sha256": self._digest(scores)})
            os.replace(part, self.folder / name)
        except (SafetensorError, OSError) as error:
            part.unlink(missing_ok=True)
            said = f"{self.folder}: scores cannot be written ({error}); make room, or name another cache_dir"
            if self.rank:
                print(f"rank {self.rank}: {said}", flush=True)  # programs print rank 0's errors alone
            raise StoppedError(said) from error

    def _digest(self, scores: dict[str, Tensor]) -> str:
        """Of the key and every score, 64 hex digits: the file format has no checksum of its own."""
        digest = hashlib.sha256(self.key.encode())
        for name in sorted(scores):
            digest.update(f"\n{name} {tuple(scores[name].shape)} {scores[name].dtype}\n".encode())
            digest.update(scores[name].numpy().data)
        return digest.hexdigest()
