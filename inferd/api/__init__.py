"""The OpenAI-compatible HTTP API of inferd."""
