"""``--autotune``: tries settings that affect speed, within a share of the run, and remembers its choice."""
