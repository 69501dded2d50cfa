"""The seal of a checkpoint folder: what its bytes must be, written last and checked on loading."""
