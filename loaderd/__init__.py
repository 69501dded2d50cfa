"""The loader daemon: owns weight memory, verifies it and hands it to inference daemons."""
