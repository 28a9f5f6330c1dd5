"""This process and its machine: environment, launcher, devices, terminal, files, background tasks."""
