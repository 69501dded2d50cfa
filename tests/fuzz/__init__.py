"""Seeded fuzzing of everything that parses a checkpoint folder's files; `python -m tests.fuzz --help`."""
