"""Checkpoints: complete or absent, verified, written by rank 0 in the background, resumed bit-identically."""
