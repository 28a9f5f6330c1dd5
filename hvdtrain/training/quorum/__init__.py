"""Backup workers: a synchronous step that closes before the slowest ranks have made their micro-batches."""
