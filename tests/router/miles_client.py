"""Run with a Miles on the path: its own rollout code and session server, through the router. Prints JSON.

python miles_client.py <router url> <model directory>
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from argparse import Namespace
from typing import Any
from urllib.parse import urlparse

import requests
import uvicorn
from miles.utils import http_utils
from miles.utils.types import Sample


class Args(Namespace):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def arguments(router: str, model: str) -> Args:
    address = urlparse(router)
    return Args(
        hf_checkpoint=model,
        sglang_router_ip=address.hostname,
        sglang_router_port=address.port,
        sglang_router_policy="consistent_hashing",
        sglang_server_concurrency=8,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=8,
        n_samples_per_prompt=1,
        use_miles_router=True,
        miles_router_middleware_paths=[],
        miles_router_timeout=60.0,
        sglang_dp_size=1,
        lora_rank=0,
        eval_num_gpus=0,
        max_weight_staleness=None,
        tito_model="default",
        session_message_matcher="strict",
        tito_allowed_append_roles=["tool", "user"],
        session_server_ip="127.0.0.1",
        use_distributed_post=False,
        use_rollout_routing_replay=False,
    )


async def rollout(args: Args) -> dict[str, Any]:
    """One sample by Miles' own generate, then its way of finding the engines to abort."""
    from miles.rollout.sglang_rollout import generate

    http_utils.init_http_client(args)
    key = "session_id" if "session_id" in Sample.__dataclass_fields__ else "routing_key"  # 0.0.2, 0.1
    sample = Sample(index=0, prompt="hello", **{key: "miles-1"})
    sample = await generate(args, sample, {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True})
    base = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
    listed = (await http_utils.get(f"{base}/list_workers"))["urls"]
    workers = [worker["url"] for worker in (await http_utils.get(f"{base}/workers"))["workers"]]
    for url in listed:
        await http_utils.post(f"{url}/abort_request", {"abort_all": True})
    return {
        "tokens": sample.response_length,
        "log_probs": len(sample.rollout_log_probs or []),
        "versions": list(sample.weight_versions),
        "listed": listed,
        "workers": workers,
    }


def session(args: Args, router: str) -> dict[str, Any]:
    """Two chat turns through Miles' session server."""
    try:
        from miles.rollout.session.session_server import SessionServer
    except ImportError:
        from miles.rollout.session.server import SessionServer
    port = http_utils.find_available_port(31000)
    args.session_server_port = port
    server = uvicorn.Server(
        uvicorn.Config(SessionServer(args, router).app, host="127.0.0.1", port=port, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    base = f"http://127.0.0.1:{port}"
    for _ in range(100):
        try:
            requests.get(f"{base}/health", timeout=2)
            break
        except requests.ConnectionError:
            time.sleep(0.1)
    key = requests.post(f"{base}/sessions", timeout=10).json()["session_id"]
    messages = [{"role": "user", "content": "hello"}]
    seen = []
    for _ in range(2):
        body = {"model": "m", "messages": messages, "max_tokens": 6, "temperature": 1.0, "ignore_eos": True}
        reply = requests.post(
            f"{base}/sessions/{key}/v1/chat/completions",
            json=body,
            headers={"X-SMG-Routing-Key": key},
            timeout=60,
        )
        assert reply.status_code == 200, reply.text
        seen.append({name: reply.headers.get(name) for name in ("X-Mixprec-Pool", "X-Mixprec-Engine")})
        message = reply.json()["choices"][0]["message"]
        messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "on"}]
    records = requests.get(f"{base}/sessions/{key}", timeout=10).json()["records"]
    tokens = [len(r["response"]["choices"][0]["meta_info"]["output_token_logprobs"]) for r in records]
    server.should_exit = True
    thread.join(5)
    return {"key": key, "headers": seen, "tokens": tokens}


def main() -> None:
    router, model = sys.argv[1:]
    args = arguments(router, model)
    print(json.dumps({"rollout": asyncio.run(rollout(args)), "session": session(args, router)}))


if __name__ == "__main__":
    main()
