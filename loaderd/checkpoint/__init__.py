"""Checkpoint folders: found below a model root, parsed strictly, read and never mapped."""
