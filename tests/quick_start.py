"""What every program works out again when it starts, worked out once or faster, with the same result; and
charts without their drawing: made of a run's own numbers as ever, and saved as a blank picture."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra._internal.hydra import Hydra
from matplotlib.figure import Figure

from reports import charts

if TYPE_CHECKING:
    from data.chat import Renderer

MOST = 900_000
"""Bytes of tokens that are kept at most: those of the embedded task's pairs are two thirds of a million."""


def compose_quickly() -> None:
    """From now on Hydra reads yaml with libyaml, where PyYAML has it, and composes the settings once: it does
    so once more to find out in which mode, which only its own settings (``hydra.…``) say."""
    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # type: ignore[misc]
    found = Hydra.get_mode

    def mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        said = any("hydra" in override for override in overrides)
        return found(self, config_name, overrides) if said else None

    Hydra.get_mode = mode  # type: ignore[method-assign]


def prepare_once() -> None:
    """From now on what every run makes of the embedded task's data is made once."""
    read_once()
    tokenise_once()


def read_once() -> None:
    """From now on a file of the embedded task's pairs is read once for as long as it stays the same."""
    from data import adder
    from data.types import Group

    real = adder.read_groups

    @functools.cache
    def once(path: Path, written: int, size: int, setting: str) -> list[Group]:
        return real(path, setting)

    def read(path: Path, setting: str = "data.path") -> list[Group]:
        if not path.is_file():
            return real(path, setting)
        about = path.stat()
        return list(once(path.absolute(), about.st_mtime_ns, about.st_size, setting))

    adder.read_groups = read


def tokenise_once() -> None:
    """From now on the same rows are tokenised once: their next file, of the same name, gets the bytes of the
    first. Its name is a digest of everything that they depend on."""
    from data import token_cache

    real = token_cache._write
    kept: dict[str, tuple[bytes, dict[str, int]]] = {}

    @functools.wraps(real)
    def write(path: Path, key: str, renderer: Renderer, make: token_cache.Make) -> None:
        if key in kept:
            content, cuts = kept[key]
            path.write_bytes(content)
            renderer.cuts.update(cuts)
            return
        before = dict(renderer.cuts)
        real(path, key, renderer, make)
        if key and path.stat().st_size < MOST:
            cuts = {what: n - before.get(what, 0) for what, n in renderer.cuts.items()}
            kept[key] = path.read_bytes(), cuts

    token_cache._write = write


BLANK = b'<svg xmlns="http://www.w3.org/2000/svg"/>'


def blank_charts(setattr: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on, figures are saved blank, and the curves of a run are not drawn on them."""

    def blank(self: Figure, to: Any, **_: Any) -> None:
        if isinstance(to, io.TextIOBase):
            to.write(BLANK.decode())
        elif hasattr(to, "write"):
            to.write(BLANK)
        else:
            Path(to).write_bytes(BLANK)

    def bare(panel: charts.Panel, records: Sequence[charts.Record]) -> Figure | None:
        return Figure() if charts.is_drawn(panel, records) else None

    setattr(Figure, "savefig", blank)
    setattr(charts, "draw", bare)
