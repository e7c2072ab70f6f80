"""Files as they are, and damage to them, for tests that import nothing heavy."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent


def everything(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Relative path -> (when it was last written, ns; its content) of every file under ``folder``."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
