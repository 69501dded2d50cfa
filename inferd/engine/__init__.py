"""The engine inside inferd: model code, scheduler and KV cache, version by version."""
