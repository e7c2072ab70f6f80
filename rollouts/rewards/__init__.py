"""Rewards of sampled completions, behind one protocol (``base.Reward``), made by ``factory.make_reward``."""
