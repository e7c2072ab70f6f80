"""Helpers that write a file either whole or not at all, compute checksums and check file names."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from common.errors import ConfigError, DataError

LINK = "is a link, through which nothing is written"


def open_own(path: Path, flags: int = os.O_WRONLY | os.O_CREAT) -> int:
    """Open a file to write to and return its descriptor. Raises OSError (ELOOP) for a link: what it points to
    is somebody else's."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OSError(error.errno, LINK, str(path)) if error.errno == errno.ELOOP else error from None


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to ``path`` and rename it to ``path`` once it is on the disk. A reader
    therefore sees the whole new file or none of it.

    Raises OSError, for example when the disk is full. The previous file at ``path`` then stays, and the
    temporary file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    try:
        part.unlink(missing_ok=True)  # a killed process may have left it
        with open(open_own(part), "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename2 is not None:  # the temporary name means nothing
            raise OSError(error.errno, error.strerror, str(path)) from error
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk names none
        raise


def regular_file(path: Path) -> Path:
    """Return ``path``. Raises OSError where it is anything but a file (a device or a pipe has no end)."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return path


def read_json(path: Path) -> Any:
    """Return the JSON in a file. Raises OSError where it is no regular file, ValueError where it is no JSON
    or is nested without end."""
    try:
        return json.loads(regular_file(path).read_bytes())
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply") from error


def read_object(path: Path, remedy: str = "") -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, or DataError, which ends in ``remedy``."""
    try:
        content = read_json(path)
    except ValueError as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}){remedy}") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged (it holds no object){remedy}")
    return content


def resolve_model_path(name_or_path: str) -> str:
    """Return the model inside a run's folder (``model/``); any other name or path is returned unchanged."""
    inner = Path(name_or_path) / "model"
    return str(inner) if (inner / "config.json").is_file() else name_or_path


def sealed(content: dict[str, Any]) -> str:
    """Return ``content`` as JSON with a checksum of itself, which ``read_sealed`` checks."""
    return json.dumps(content | {"sha256": _seal(content)}, indent=2, ensure_ascii=False) + "\n"


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the content of a file of ``sealed``. Raises OSError, and ValueError where it is not as it was
    written."""
    content = read_json(path)
    if not isinstance(content, dict) or content.pop("sha256", None) != _seal(content):
        raise ValueError("it has another checksum")
    return content


def _seal(content: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` through ``whole_file``. Raises OSError."""
    with whole_file(path) as stream:
        stream.write(text.encode())


def write_if_changed(path: Path, text: str) -> None:
    """Write ``text`` with ``write_whole``, unless the file already has exactly this content. Raises
    OSError."""
    if not path.is_file() or path.read_bytes() != text.encode():
        write_whole(path, text)


def lines_of(text: str) -> list[str]:
    """Return the lines of a text without their line ends. ``str.splitlines`` would also split at U+2028,
    U+2029 and U+0085, which JSON leaves as they are within a text."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def on_disk(path: Path | str) -> str:
    """Return the disk of a path, which need not exist, for messages about room: ``(disk /data, 0.0 GB
    free)``."""
    place = Path(path).absolute()
    with suppress(OSError):
        while not place.exists():
            place = place.parent
        place = place.resolve()
        mount = next(folder for folder in (place, *place.parents) if folder.is_mount())
        return f"(disk {mount}, {shutil.disk_usage(place).free / 1e9:.1f} GB free)"
    return f"(disk of {path})"


def part_of(path: Path) -> Path:
    """Return the temporary path at which ``path`` is written before it is renamed."""
    return path.with_name(f".{path.name}.part")


_NAME = re.compile(r"[A-Za-z0-9._+=-]+")
_LONGEST_NAME = 200


def check_name(key: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is a valid name of one folder or file on every file system."""
    named = isinstance(value, str) and _NAME.fullmatch(value) is not None and len(value) <= _LONGEST_NAME
    if not named or value in (".", "..") or value.startswith("-"):
        raise ConfigError(
            key,
            value,
            "becomes the name of a folder or file: letters, digits and . _ + - = alone, at most "
            f"{_LONGEST_NAME} of them, not . or .., and no - at the beginning",
        )


def files_digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of one file, as 64 hex digits. For several files, return the SHA-256 of the lines
    that ``sha256sum`` would print for them."""
    digests = {path.name: _sha256(path) for path in paths}
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{digest}  {name}\n" for name, digest in digests.items())
    return hashlib.sha256(lines.encode()).hexdigest()


def _sha256(path: Path) -> str:
    about = path.stat()
    return _read(path, about.st_size, about.st_mtime_ns)


@cache
def _read(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class FileDigests:
    """SHA-256 digests of files, kept in a file by path, size, time of change and inode, so that programs that
    start later need not read the files again."""

    def __init__(self, path: Path) -> None:
        """``path``: the file of digests; a damaged one is made again."""
        self.path, self._kept = path, dict[str, list[Any]]()
        with suppress(OSError, ValueError):
            self._kept = read_sealed(path)["files"]
        self._before = dict(self._kept)

    def of(self, file: Path) -> str:
        """Return the digest of a file; of one in the hub's cache the name of its blob, which is one. Raises
        OSError."""
        real = file.resolve()
        if real.parent.name == "blobs":
            return real.name
        about = real.stat()
        state = [about.st_size, about.st_mtime_ns, about.st_ino]
        digest, *kept = self._kept.get(str(real), [""])
        if kept != state:
            digest = _sha256(real)
            if time.time() - about.st_mtime > _SETTLED:
                self._kept[str(real)] = [digest, *state]
        return str(digest)

    def save(self) -> None:
        """Keep the digests; without room they are computed again next time."""
        if self._kept != self._before:
            with suppress(OSError):
                write_whole(self.path, sealed({"files": self._kept}))


_SETTLED = 2.0
"""Seconds after which a further change of a file surely shows in its time."""


def check_writable(key: str, value: Path, folder: Path) -> None:
    """Raise ConfigError about ``value`` if ``folder`` cannot be made, or be written to. It is tried,
    since permissions do not tell (/proc, a full quota, a file system that is read-only)."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    if not above.is_dir():
        raise ConfigError(key, value, f"{above} is no folder; name a folder to write in")
    try:
        tempfile.TemporaryDirectory(prefix=".writable-", dir=above).cleanup()
    except OSError as error:
        why = f"{above} is not writable ({error.strerror}); name a folder to write in"
        raise ConfigError(key, value, why) from error
