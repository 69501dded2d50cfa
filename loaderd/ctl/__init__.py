"""loaderctl: the command line that talks to loaderd over `control.sock` and `events.sock`."""
