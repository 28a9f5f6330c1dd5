"""How the ranks of a run train together: synchronously, by local SGD, or one after the other."""
