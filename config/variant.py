"""The name of a run's variant, for whoever has its settings as plain data or typed."""

from __future__ import annotations


def variant(online: bool, humanline: bool, sync_mode: str | None) -> str:
    """One of the paper's four, offline, online, offline+humanline, online+humanline; trust-region syncing is
    said beside it."""
    return (
        ("online" if online else "offline")
        + "+humanline" * humanline
        + "+trust-region" * (sync_mode == "trust_region")
    )
