"""A cache of token ids on disk, so that a second start on the same data reads the ids of the first.

An entry is one file, ``<cache_dir>/tokens/<key>.safetensors`` (``data.token_rows``), with four bytes per
token and 24 per row. Its key is a digest of everything that the ids depend on: the words of every row in
order, the renderer's fingerprint (tokenizer, template, lengths), the code that renders and the versions of
the libraries that it calls. So an entry is never out of date, and losses that need the same rows of the same
groups (DPO and KTO) share an entry. Any entry may be deleted while no run reads it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from uuid import uuid4

from safetensors import SafetensorError

from common.errors import DataError
from common.files import temporary_folder
from common.progress import SOON, progress
from data import chat, templates, token_rows
from data.chat import Renderer
from data.token_rows import Rendered, TokenRows
from data.types import Completion, Prompt, Sequence

Row = tuple[Prompt, Completion]
_AT_ONCE = 1_024
"""Rows that are tokenised together: enough to occupy all cores. These rows are in memory meanwhile."""


class TokenCache:
    """``Renderer.sequences`` for many rows, cached under ``root``/tokens. Any number of processes may use a
    folder at once: an entry is written under a temporary name and then renamed, and two processes that write
    the same entry write the same bytes."""

    def __init__(self, root: Path, write: bool = True, worth: int = 2_000) -> None:
        """With ``write`` False, no file is left behind. The cache is used from ``worth`` rows on; fewer are
        tokenised in about a second and kept in memory."""
        self.folder, self.write, self.worth = root / "tokens", write, worth

    def sequences(self, renderer: Renderer, rows: Collection[Row]) -> Rendered:
        """Return the same as ``renderer.sequences(rows)``, including its count of cuts, from the entry of
        these rows if a sound one exists. This iterates over ``rows`` twice."""
        if len(rows) < self.worth:
            return renderer.sequences(rows)
        key = content_key(renderer, rows)
        path = self.folder / f"{key}.safetensors"
        found = self._read(path, key, len(rows))
        if found is not None:
            rendered, cuts = found
            renderer.cuts.update(cuts)
            return rendered
        return (self._made(path, key, renderer, rows) if self.write else None) or _in_passing(
            key, renderer, rows
        )

    def _read(self, path: Path, key: str, rows: int) -> tuple[TokenRows, dict[str, int]] | None:
        """Return (rows, cuts) of an entry; None if there is none, or if its content is not what was written
        under this key. The latter is printed."""
        try:
            found, about = token_rows.read_rows(path)
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            _again(path, str(error))
            return None
        if about["key"] != key or len(found) != rows:
            _again(path, "not what was written under this name")
            return None
        return found, about["cuts"]

    def _made(self, path: Path, key: str, renderer: Renderer, rows: Collection[Row]) -> TokenRows | None:
        """Tokenise the rows into the entry ``path`` and return them; None if the entry cannot be written,
        which is printed."""
        part = path.with_name(f".{key}-{uuid4().hex}.part")  # a process id is not unique across nodes
        before = dict(renderer.cuts)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _tokenise(part, key, renderer, rows)
            os.replace(part, path)
            return token_rows.read_rows(path)[0]
        except OSError as error:
            print(
                f"{path}: not written ({error}); the next start tokenises its rows again. Is cache_dir a "
                "folder to write in?",
                flush=True,
            )
            renderer.cuts.clear()
            renderer.cuts.update(before)
            return None
        finally:
            if part.exists():
                part.unlink()


def _in_passing(key: str, renderer: Renderer, rows: Collection[Row]) -> TokenRows:
    """Tokenise the rows into a temporary file that no longer has a name, and return them. Raises DataError if
    there is no room for it."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            _tokenise(path := Path(folder) / "rows", key, renderer, rows)
            return token_rows.read_rows(path)[0]
    except OSError as error:
        raise DataError(
            f"{temporary_folder()}: the token ids of the data do not fit ({error}); make room, or set "
            "TMPDIR to a folder on a larger disk"
        ) from error


def _tokenise(path: Path, key: str, renderer: Renderer, rows: Collection[Row]) -> None:
    before = dict(renderer.cuts)

    def about() -> dict[str, object]:
        cuts = {what: n - before.get(what, 0) for what, n in renderer.cuts.items()}
        return {"key": key, "cuts": cuts}

    token_rows.write_rows(path, _rendered(renderer, rows), about)


def _rendered(renderer: Renderer, rows: Collection[Row]) -> Iterator[Sequence | str]:
    stream = iter(rows)
    with progress(len(rows), "tokenise (data.path)", unit="row", shown=None, delay=SOON) as bar:
        while part := list(itertools.islice(stream, _AT_ONCE)):
            yield from renderer.sequences(part)
            bar.update(len(part))


def content_key(renderer: Renderer, rows: Iterable[Row]) -> str:
    """Return 32 hex digits of everything that ``renderer.sequences(rows)`` depends on."""
    digest = hashlib.blake2b(digest_size=16)
    versions = [version(package) for package in ("tokenizers", "transformers", "jinja2")]
    code = [Path(str(module.__file__)).read_bytes() for module in (chat, templates, token_rows)]
    digest.update(repr((renderer.fingerprint, versions, code)).encode())
    for prompt, completion in rows:
        # repr escapes line ends, so no two lists of rows give the same text.
        said = (completion.text, completion.token_ids, completion.finished, completion.keys)
        digest.update(f"\n{prompt.id}{said!r}".encode())
    return digest.hexdigest()


def _again(path: Path, why: str) -> None:
    print(f"{path}: damaged or foreign ({why}); its rows are tokenised again", flush=True)
