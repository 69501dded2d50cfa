"""Memory backends: the seam between the daemons and where weights live."""
