"""Runs as their files describe them, for all that reads runs: their files, records and reports."""
