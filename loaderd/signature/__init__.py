"""A checkpoint folder's signature: an OpenSSF model-signing bundle, made and checked with keys."""
