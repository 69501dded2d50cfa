"""What both daemons speak: ids, errors, messages, fd passing, layout and memory backends."""
