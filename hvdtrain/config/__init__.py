"""Configuration classes: frozen dataclasses, validated when built, that the command line and TOML files come from."""
