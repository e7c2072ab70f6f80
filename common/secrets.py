"""Detection of secrets in settings, and removal of secrets from text that other people may see, such as
messages."""

from __future__ import annotations

import os
import re
from typing import Any

REMOVED = "[removed]"
_SECRET_NAME = re.compile(r"(^|[_.\-])(key|apikey|token|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    # Weights & Biases. Its older keys are plain hex, like a commit hash, so only their names reveal them.
    r"|\bwandb_v\d+_[A-Za-z0-9_\-]{16,}"
    r"|\bsk-[A-Za-z0-9_\-]{16,}"  # OpenAI and providers with the same format
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}"
    r"|\b(?:gsk|xai)[_-][A-Za-z0-9]{16,}|\bAIza[A-Za-z0-9_\-]{30,}|\bAKIA[A-Z0-9]{16}\b"  # other providers
    r"|(?<=://)[^/\s@]+:[^/\s@]+(?=@)"  # user:password in a URL
)
_ASSIGNED = re.compile(
    r"((?:api_?key|secret|passw(?:or)?d|(?:access|api|auth|hf|hub)_token)\s*[=:]\s*)"
    r"(?!null\b|\[removed\])[^\s,;'\"]*[^\s,;:'\"]",
    re.IGNORECASE,
)
"""A value that follows the name of a secret and ``=`` or ``:``."""
_SECRET_VARIABLE = re.compile(r"(key|token|secret|passw(or)?d)_env$", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_LONGEST_NAME = 40
_SHORTEST_SECRET = 8
"""Minimum number of characters. A shorter environment value is more likely a word than a secret, and removing
it would damage ordinary text."""


def is_secret(key: str, value: Any) -> bool:
    """Return whether the name of the key marks the value as a secret: ``api_key`` and ``token`` do,
    ``max_tokens`` does not. ``api_key_env`` holds the name of an environment variable. A value there that
    does not look like such a name also counts as a secret, because it may be the key itself, typed in the
    wrong place."""
    if not isinstance(value, str) or not value:
        return False
    misplaced = _SECRET_VARIABLE.search(key) and not _is_variable_name(value)
    return bool(_SECRET_NAME.search(key) or misplaced)


def _is_variable_name(text: str) -> bool:
    """Return whether ``text`` consists of capital words joined by underscores. Some keys also have capitals,
    digits and underscores, but no key consists of such words alone."""
    return bool(_VARIABLE.fullmatch(text)) and len(text) <= _LONGEST_NAME and not _SECRET_VALUE.search(text)


def named_secrets() -> list[str]:
    """Return the values of the environment variables whose names mark them as secrets, longest first, because
    one value may contain another."""
    named = (v for k, v in os.environ.items() if _SECRET_NAME.search(k) and len(v) >= _SHORTEST_SECRET)
    return sorted(named, key=len, reverse=True)


def scrub_text(text: str, named: list[str] | None = None) -> str:
    """Return ``text`` without the values in ``named`` (default: ``named_secrets()``), without anything that
    has the format of a token and without values assigned to the name of a secret."""
    for value in named_secrets() if named is None else named:
        text = text.replace(value, REMOVED)
    return _ASSIGNED.sub(rf"\1{REMOVED}", _SECRET_VALUE.sub(REMOVED, text))
