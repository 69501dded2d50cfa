"""The demo: real daemons, real clients, and swaps that nobody may notice; `python -m demo`."""
