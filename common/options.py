"""The parser of a program's options."""

from __future__ import annotations

import argparse
from pathlib import Path


def options_of(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help has ``about``, a module's docstring, as it is written. ``program``: as it is
    typed, ``python -m launch.status``."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(program, description=about, formatter_class=form)


def run_folder(text: str) -> Path:
    """Return the folder of a run that was typed as ``runs/mine`` or, as for the programs with settings,
    ``run=runs/mine``."""
    return Path(text.removeprefix("run="))
