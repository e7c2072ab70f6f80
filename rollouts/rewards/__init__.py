"""Rewards of sampled completions, behind one protocol (``base.Reward``)."""
