"""The command line: train, eval, export, bench, doctor."""
