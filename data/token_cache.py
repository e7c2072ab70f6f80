"""Token ids on disk: the second start on the same data reads what the first one made.

An entry is one file, ``<cache_dir>/tokens/<key>.safetensors``: four bytes a token, twelve a row (prompts
once: 51 MB for 60,000 pairs of short chats). Its key is a digest of everything that the ids depend on: the
words of every row in their order, the renderer's fingerprint (tokenizer, template, lengths), the code that
renders and the versions of what it calls. So nothing is ever out of date, losses that want the same rows of
the same groups (DPO and KTO) share an entry, and any of it may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from data import chat
from data.chat import Renderer
from data.types import Completion, Prompt, Sequence

Row = tuple[Prompt, Completion]
Rendered = list[Sequence | str]
"""A tokenised row, or the reason why there is none, in the order of the rows."""


class TokenCache:
    """``Renderer.sequences`` of many rows, remembered under ``root``/tokens. Any number of processes may use
    a folder at once: entries are written beside and renamed, and two that write the same one write the same
    bytes."""

    def __init__(self, root: Path, write: bool = True, worth: int = 2_000) -> None:
        """``write`` False: read alone. ``worth``: rows from which on it is used; fewer are tokenised in about
        a second."""
        self.folder, self.write, self.worth = root / "tokens", write, worth

    def sequences(self, renderer: Renderer, rows: Iterable[Row]) -> Rendered:
        """As ``renderer.sequences(rows)``, its count of cuts included, from the entry of these rows if there
        is a sound one."""
        rows = list(rows)
        if len(rows) < self.worth:
            return renderer.sequences(rows)
        key = content_key(renderer, rows)
        path = self.folder / f"{key}.safetensors"
        found = self._read(path, key, len(rows))
        if found is not None:
            rendered, cuts = found
            renderer.cuts.update(cuts)
            return rendered
        before = dict(renderer.cuts)
        rendered = renderer.sequences(rows)
        if self.write:
            self._store(
                path, key, rendered, {what: n - before.get(what, 0) for what, n in renderer.cuts.items()}
            )
        return rendered

    def _read(self, path: Path, key: str, rows: int) -> tuple[Rendered, dict[str, int]] | None:
        """(rows, cuts) of an entry; None if there is none, or one that is not what was written under this
        key, which is said."""
        try:
            with safe_open(path, framework="numpy") as file:
                about, digest = json.loads((file.metadata() or {}).get("entry", '["{}", ""]'))
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            _again(path, str(error))
            return None
        known = json.loads(about)
        if known.get("key") != key or digest != _digest(about, arrays) or len(arrays["reason"]) != rows:
            _again(path, "not what was written under this name")
            return None
        return _unpacked(arrays, known["reasons"]), known["cuts"]

    def _store(self, path: Path, key: str, rendered: Rendered, cuts: dict[str, int]) -> None:
        arrays, reasons = _packed(rendered)
        about = json.dumps({"key": key, "reasons": reasons, "cuts": cuts})
        entry = json.dumps(
            [about, _digest(about, arrays)]
        )  # one text: the order of several is not the same every time
        part = path.with_name(f".{key}-{uuid4().hex}.part")  # a process number may be another node's too
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file(arrays, part, metadata={"entry": entry})
            os.replace(part, path)
        except (SafetensorError, OSError) as error:
            print(
                f"{path}: not written ({error}); the next start tokenises its rows again. Is cache_dir a "
                "folder to write in?",
                flush=True,
            )
        finally:
            if part.exists():
                part.unlink()


def content_key(renderer: Renderer, rows: Iterable[Row]) -> str:
    """32 hex digits of everything that ``renderer.sequences(rows)`` depends on."""
    digest = hashlib.blake2b(digest_size=16)
    versions = [version(package) for package in ("tokenizers", "transformers", "jinja2")]
    code = [Path(str(module)).read_bytes() for module in (chat.__file__, __file__)]
    digest.update(repr((renderer.fingerprint, versions, code)).encode())
    for prompt, completion in rows:
        # repr escapes line ends, so no two lists of rows give the same text.
        digest.update(
            f"\n{prompt.id}{(completion.text, completion.token_ids, completion.finished)!r}".encode()
        )
    return digest.hexdigest()


def _again(path: Path, why: str) -> None:
    print(f"{path}: damaged or foreign ({why}); its rows are tokenised again", flush=True)


def _digest(about: str, arrays: dict[str, np.ndarray]) -> str:
    """Of an entry's content: the file format has no checksum of its own."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _packed(rendered: Rendered) -> tuple[dict[str, np.ndarray], list[str]]:
    """(arrays, reasons) of an entry. Row r is reason ``reason[r]``, or where that is -1 the prompt
    ``prompt[r]`` and a completion."""
    numbers: dict[int, int] = {}
    prompts: list[np.ndarray] = []
    reasons: dict[str, int] = {}
    prompt, reason = np.full(len(rendered), -1, np.int32), np.full(len(rendered), -1, np.int32)
    for r, row in enumerate(rendered):
        if isinstance(row, str):
            reason[r] = reasons.setdefault(row, len(reasons))
            continue
        if id(row.prompt_ids) not in numbers:
            numbers[id(row.prompt_ids)] = len(prompts)
            prompts.append(row.prompt_ids)
        prompt[r] = numbers[id(row.prompt_ids)]
    completions = [row.completion_ids for row in rendered if isinstance(row, Sequence)]
    arrays = {"prompt": prompt, "reason": reason}
    for name, parts in (("prompts", prompts), ("completions", completions)):
        arrays[name] = np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)
        arrays[f"{name}_lengths"] = np.array([len(ids) for ids in parts], np.int32)
    return arrays, list(reasons)


def _unpacked(arrays: dict[str, np.ndarray], reasons: list[str]) -> Rendered:
    """The inverse of ``_packed``: rows are views of the entry's arrays, rows of a prompt share its ids."""
    prompts = _split(arrays["prompts"], arrays["prompts_lengths"])
    completions = iter(_split(arrays["completions"], arrays["completions_lengths"]))
    numbers = zip(arrays["prompt"].tolist(), arrays["reason"].tolist(), strict=True)
    return [
        reasons[reason] if reason >= 0 else Sequence(prompts[prompt], next(completions))
        for prompt, reason in numbers
    ]


def _split(tokens: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    ends = lengths.astype(np.int64).cumsum().tolist()
    return [tokens[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]
