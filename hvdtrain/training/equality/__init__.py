"""The check that a program's steps on several ranks are those of one process."""
