"""How long things take: calls, the parts of a step, a profile of single operations."""
