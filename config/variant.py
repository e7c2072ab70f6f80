"""The name of a run's variant, computed from settings that may be plain data or typed."""

from __future__ import annotations

OTHER = ("trust_region", "ema", "reset", "kl", "delayed")
"""Modes of syncing that are not the paper's."""


def variant(online: bool, humanline: bool, sync_mode: str | None) -> str:
    """Return one of the paper's four variants: offline, online, offline+humanline or online+humanline. A mode
    of syncing that is not the paper's is appended."""
    return (
        ("online" if online else "offline")
        + "+humanline" * humanline
        + (f"+{sync_mode.replace('_', '-')}" if sync_mode in OTHER else "")
    )
