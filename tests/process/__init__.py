"""Real daemons, real sockets, real (small) models, SIGKILL."""
