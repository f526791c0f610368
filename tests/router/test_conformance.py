"""Real SGLang behind the router's own process: as if the router were not there, and as Miles expects it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from real_engine import ROOT, SHIMS, Stage, ask, post, stage, wait

pytestmark = pytest.mark.engines

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {"text": ["a"] * 16, "sampling_params": GREEDY | {"max_new_tokens": 900}}
VOLATILE = ("time", "cached", "_ts", "latency", "throughput", "created")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("engine")) as made:
        yield made


def steady(value: Any) -> Any:
    """A reply without what differs between two identical requests."""
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "id" and not any(word in k for word in VOLATILE)}
        return {k: steady(v) for k, v in kept.items()}
    return [steady(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/generate",
            {
                "input_ids": [5, 6, 7],
                "sampling_params": GREEDY | {"top_p": 0.97, "top_k": 16},
                "return_logprob": True,
                "top_logprobs_num": 8,
                "return_sampling_mask": True,
            },
        ),
        (
            "/v1/chat/completions",
            {
                "model": "m",
                "messages": [{"role": "user", "content": "hi"}],
                "temperature": 0,
                "max_tokens": 6,
                "logprobs": True,
                "top_logprobs": 4,
                "return_meta_info": True,
                "return_prompt_token_ids": True,
            },
        ),
        ("/v1/completions", {"model": "m", "prompt": "hi", "temperature": 0, "max_tokens": 6}),
    ],
)
def test_replies_keep_every_field(live: Stage, path: str, body: dict[str, Any]) -> None:
    post(live.engine + path, body)  # the prefix cache is warm for both
    direct = steady(post(live.engine + path, body))
    routed = steady(post(live.router + path, body, {"X-SMG-Routing-Key": "fields"}))
    assert routed == direct


def test_attribution_names_the_engine_and_its_version(live: Stage) -> None:
    address = urlparse(live.router)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Content-Type": "application/json", "X-SMG-Routing-Key": "who"}
    connection.request("POST", "/generate", json.dumps({"text": "a", "sampling_params": GREEDY}), headers)
    reply = connection.getresponse()
    meta = json.loads(reply.read())["meta_info"]
    assert reply.headers["X-Mixprec-Engine"] == "bf16/0" and reply.headers["X-Mixprec-View"] == "bf16"
    assert reply.headers["X-Mixprec-Weight-Version"] == meta["weight_version"] == "0"
    session = ask(live.router + "/sessions/who")
    assert session["turns"] == [{"engine": "bf16/0", "weight_version": 0}]


def test_streams_arrive_piece_by_piece(live: Stage) -> None:
    address = urlparse(live.router)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    body = {"text": "a", "sampling_params": GREEDY, "stream": True}
    connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
    lines = [line for line in connection.getresponse().read().split(b"\n\n") if line]
    assert len(lines) > 3 and lines[-1] == b"data: [DONE]"


def test_the_router_sees_the_engines_load_and_ends_work_nobody_waits_for(live: Stage) -> None:
    address = urlparse(live.router)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(LONG), {"Content-Type": "application/json"})
    wait(lambda: running(live) > 0, 20)
    connection.close()
    wait(lambda: running(live) == 0, 20)
    engine = ask(live.router + "/fleet")["pools"]["bf16"]["engines"]["bf16/0"]
    assert engine["breaker"] == "closed" and engine["in_flight"] == 0 and engine["answered"] == 0


def running(live: Stage) -> int:
    return ask(live.engine + "/v1/loads?include=core")["loads"][0]["num_running_reqs"]


def test_abort_through_the_router_ends_generation_with_a_reply(live: Stage) -> None:
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.extend(post(live.router + "/generate", LONG)))
    thread.start()
    wait(lambda: running(live) > 0, 20)
    assert post(live.router + "/abort_request", {"abort_all": True})["success"]
    thread.join(20)
    assert "abort" in {reply["meta_info"]["finish_reason"]["type"] for reply in replies}


@pytest.mark.miles
@pytest.mark.parametrize("generation", ["0.0.2", "0.1"])
def test_miles_own_rollout_and_session_server(live: Stage, generation: str) -> None:
    path = [str(SHIMS), str(ROOT)]
    if generation == "0.1":
        source, sglang = os.environ.get("MILES_SOURCE"), Path(sys.prefix) / "sglang-0.5.16"
        if not source or not sglang.exists():
            pytest.skip("no Miles 0.1: set MILES_SOURCE to a checkout and run tests/run.sh")
        path[1:1] = [source, str(sglang)]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "MIXPREC_CPU_TRAINER": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    client = Path(__file__).with_name("miles_client.py")
    done = subprocess.run(
        [sys.executable, str(client), live.router, str(live.model)], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    rollout, session = told["rollout"], told["session"]
    assert rollout["tokens"] == rollout["log_probs"] == 8 and rollout["versions"] == ["0"]
    assert rollout["listed"] == rollout["workers"] == [live.engine]
    assert session["tokens"] == [6, 6]
    assert session["headers"] == [{"X-Mixprec-Pool": "bf16", "X-Mixprec-Engine": "bf16/0"}] * 2
    assert len(ask(f"{live.router}/sessions/{session['key']}")["turns"]) == 2
