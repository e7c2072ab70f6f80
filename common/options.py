"""The parser of a program's options."""

from __future__ import annotations

import argparse


def options_of(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help has ``about``, a module's docstring, as it is written. ``program``: as it is
    typed, ``python -m launch.status``."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(program, description=about, formatter_class=form)
