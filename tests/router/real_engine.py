"""One real SGLang engine on the CPU behind the router's own process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_model import write_tiny_model

from miles_mixprec.providers.process import free_port

ROOT = Path(__file__).parents[2]
SHIMS = ROOT / "examples" / "cpu_quickstart" / "shims"
SGLANG = Path(os.environ.get("SGLANG_0523", Path(sys.prefix) / "sglang-0.5.23"))
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True)
class Stage:
    engine: str
    router: str
    model: Path


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    model = write_tiny_model(folder / "model")
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    port = free_port()
    flags = (
        f"--model-path {model} --port {port} --host 127.0.0.1 --device cpu --dtype float32 --weight-version 0 "
        "--attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule --disable-cuda-graph "
        "--skip-server-warmup --sleep-on-idle --mem-fraction-static 0.1 --max-total-tokens 8192 --log-level error "
        "--max-running-requests 8"
    )
    env = os.environ | {
        "PYTHONPATH": f"{SHIMS}:{SGLANG}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    engine = f"http://127.0.0.1:{port}"
    tree = {
        "fleet": {
            "name": "one",
            "model": str(model),
            "context_length": 1024,
            "pools": {"bf16": {"view": "bf16", "slots_per_engine": 64, "urls": [engine]}},
        },
        "algo": {"name": "plain"},
        "weights": {"store": str(folder / "store")},
        **{"run_dir": str(folder), "run_id": "t", "updates": 1, "prompts_per_update": 1},
    }
    config, ready = folder / "run.json", folder / "ready.json"
    config.write_text(json.dumps(tree))
    with ExitStack() as stack:
        stack.enter_context(process([sys.executable, "-m", "sglang.launch_server", *flags.split()], env))
        router = [sys.executable, "-m", "miles_mixprec.router", "--config", str(config), "--ready-file", str(ready)]
        stack.enter_context(process(router, os.environ | {"PYTHONPATH": str(ROOT)}))
        wait(lambda: ready.exists())
        wait(lambda: ask(f"{engine}/model_info") is not None)
        url = json.loads(ready.read_text())["url"]
        post(f"{url}/add_worker?url={engine}", {})
        yield Stage(engine, url, model)


@contextmanager
def process(argv: list[str], env: dict[str, str]) -> Iterator[None]:
    child = subprocess.Popen(argv, env=env, start_new_session=True)
    try:
        yield
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait(condition: Any, limit_s: float = 120.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.3)


def ask(url: str) -> Any:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return json.loads(reply.read())
    except OSError:
        return None


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"} | (headers or {})
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())
