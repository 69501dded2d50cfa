"""The API over the built-in engine with two versions of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inferd.engine.transformers_engine import EngineSettings, TransformersEngine

from ..engine.checkpoints import make_checkpoint, read_tensors, update_low_rank
from .serving import MODEL, V1, V2, CountedAdmission, Served, serve

HI = [{"role": "user", "content": "The capital of France is"}]
GREEDY = {"model": MODEL, "messages": HI, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("tiny"))
    tensors = read_tensors(folder)
    engine = TransformersEngine(EngineSettings(kv_cache_bytes=1 << 24, torch_threads=1))
    engine.start()
    engine.build(0, V1, tensors, folder)
    engine.build(1, V2, update_low_rank(tensors), folder)
    with serve(engine, CountedAdmission(V1, V2)) as served:
        yield served


def streamed(served: Served, **change: object) -> tuple[str, str | None]:
    text, fingerprint = "", None
    for chunk in served.openai().chat.completions.create(**GREEDY | change, stream=True):
        text += chunk.choices[0].delta.content or ""
        fingerprint = chunk.system_fingerprint
    return text, fingerprint


def test_both_versions_answer_each_with_its_own_text(real: Served) -> None:
    answers = {}
    for slot, tag in enumerate((V1, V2)):
        real.admission.current = slot
        whole = real.openai().chat.completions.create(**GREEDY)  # type: ignore[call-overload]
        assert whole.system_fingerprint == str(tag)
        assert streamed(real) == (whole.choices[0].message.content, str(tag))
        assert whole.usage.completion_tokens <= 24
        answers[tag] = whole.choices[0].message.content
    assert answers[V1] != answers[V2]


def test_logprobs_of_the_chosen_token_are_the_best_under_greedy(real: Served) -> None:
    real.admission.current = 0
    answer = real.openai().chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == max(one.logprob for one in token.top_logprobs)
        assert token.logprob <= 0


def test_a_prompt_that_was_seen_is_found_in_the_cache(real: Served) -> None:
    real.admission.current = 0
    long = GREEDY | {"messages": [{"role": "user", "content": "round and round " * 12}]}
    create = real.openai().chat.completions.create
    create(**long)  # type: ignore[call-overload]
    details = create(**long).usage.prompt_tokens_details  # type: ignore[call-overload]
    assert details.cached_tokens > 0


def test_what_the_engine_refuses_is_a_400(real: Served) -> None:
    body = {"model": MODEL, "prompt": [5, 100_000]}
    response = real.http().post("/v1/completions", json=body)
    assert response.status_code == 400
    assert "100000" in response.json()["error"]["message"]


def test_a_client_that_goes_away_leaves_nothing_in_the_engine(real: Served) -> None:
    real.admission.current = 0
    body = json.dumps(GREEDY | {"stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with real.connect() as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
    assert real.admission.wait_none_out(60)
    load = real.engine.load()
    assert (load.running, load.waiting, load.kv_blocks_free) == (0, 0, load.kv_blocks_total)
