"""What is a secret, and text without it: for messages, and for whatever other people are shown."""

from __future__ import annotations

import os
import re
from typing import Any

REMOVED = "[removed]"
_SECRET_NAME = re.compile(r"(^|[_.\-])(key|apikey|token|secret|passw(or)?d|credentials?)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    # Weights & Biases; its older keys are bare hex like a commit: known by their names alone
    r"|\bwandb_v\d+_[A-Za-z0-9_\-]{16,}"
    r"|\bsk-[A-Za-z0-9_\-]{16,}"  # OpenAI and those who followed
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_[A-Za-z0-9_]{16,}"
    r"|\b(?:gsk|xai)[_-][A-Za-z0-9]{16,}|\bAIza[A-Za-z0-9_\-]{30,}|\bAKIA[A-Z0-9]{16}\b"  # other providers
    r"|(?<=://)[^/\s@]+:[^/\s@]+(?=@)"  # user:password in a URL
)
_ASSIGNED = re.compile(
    r"((?:api_?key|secret|passw(?:or)?d|(?:access|api|auth|hf|hub)_token)\s*[=:]\s*)"
    r"(?!null\b|\[removed\])[^\s,;'\"]*[^\s,;:'\"]",
    re.IGNORECASE,
)
"""A value that follows the name of a secret."""
_SECRET_VARIABLE = re.compile(r"(key|token|secret|passw(or)?d)_env$", re.IGNORECASE)
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_LONGEST_NAME = 40
_SHORTEST_SECRET = 8
"""Characters: a shorter environment value is more likely a word than a secret, and would be cut out of
ordinary text."""


def is_secret(key: str, value: Any) -> bool:
    """Whether a setting's value is a secret by the name of its key: ``api_key``, ``token`` …, but not
    ``max_tokens``. ``api_key_env`` is the name of an environment variable; what cannot be meant as one may be
    the key itself, typed in the wrong place."""
    if not isinstance(value, str) or not value:
        return False
    misplaced = _SECRET_VARIABLE.search(key) and not _is_variable_name(value)
    return bool(_SECRET_NAME.search(key) or misplaced)


def _is_variable_name(text: str) -> bool:
    """Capital words joined by underscores. Some keys have capitals, digits and underscores too, but none this
    form alone."""
    return bool(_VARIABLE.fullmatch(text)) and len(text) <= _LONGEST_NAME and not _SECRET_VALUE.search(text)


def named_secrets() -> list[str]:
    """The values of the environment variables that are named like secrets, the longest first: one may hold
    another."""
    named = (v for k, v in os.environ.items() if _SECRET_NAME.search(k) and len(v) >= _SHORTEST_SECRET)
    return sorted(named, key=len, reverse=True)


def scrub_text(text: str, named: list[str] | None = None) -> str:
    """``text`` without anything shaped like a token or assigned to the name of a secret, and without
    ``named``, by default ``named_secrets()``."""
    for value in named_secrets() if named is None else named:
        text = text.replace(value, REMOVED)
    return _ASSIGNED.sub(rf"\1{REMOVED}", _SECRET_VALUE.sub(REMOVED, text))
