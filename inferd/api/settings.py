"""What an operator may set about the API."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits on what one request may ask for, and what the API says when it cannot answer."""

    max_body_bytes: int = 8 * 1024 * 1024
    max_sequences_per_request: int = 128  # prompts times n
    retry_after_s: int = 1  # said with 429 and 503
    completion_max_tokens: int = 16  # for /v1/completions, when the request does not say
