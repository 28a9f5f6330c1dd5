"""Elastic jobs: a coordinator decides which processes train together, and each of them follows it."""
