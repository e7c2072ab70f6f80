"""The name of a run's variant, for whoever has its settings as plain data or typed."""

from __future__ import annotations

OTHER = ("trust_region", "ema", "reset", "kl")
"""Ways to sync that are not the paper's."""


def variant(online: bool, humanline: bool, sync_mode: str | None) -> str:
    """One of the paper's four, offline, online, offline+humanline, online+humanline; another way to sync is
    said beside it."""
    return (
        ("online" if online else "offline")
        + "+humanline" * humanline
        + (f"+{sync_mode.replace('_', '-')}" if sync_mode in OTHER else "")
    )
