"""Local SGD: periodic parameter averaging."""
