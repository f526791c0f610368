"""Engines on a real local Ray cluster, behind the real router, while sessions run through it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from miles_mixprec.config import Config, Fleet, Pool, load, to_file  # noqa: E402
from miles_mixprec.errors import EngineError  # noqa: E402
from miles_mixprec.providers.base import await_engines  # noqa: E402
from miles_mixprec.providers.ray import Launch, RayProvider, actor_options  # noqa: E402

FAKE = str(Path(__file__).with_name("fake_server.py"))
ROOT = str(Path(__file__).parents[2])
KEY = "X-SMG-Routing-Key"


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One node with two kinds of accelerators, by name: nothing of them is used."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    ray.init(
        num_cpus=2,
        num_gpus=8,
        resources={"accelerator_type:H200": 1, "accelerator_type:H100": 1},
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": ROOT}},
    )
    yield
    ray.shutdown()


def provide(tmp_path: Path, pools: dict[str, Pool]) -> RayProvider:
    fleet = Fleet(name="f", model="m", context_length=64, provider="ray", pools=pools)
    return RayProvider(fleet, Launch(str(tmp_path), server=(FAKE,), host="127.0.0.1"))


def request(url: str, body: Any = None, **headers: str) -> Any:
    data = None if body is None else json.dumps(body).encode()
    call = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"} | headers)
    with urllib.request.urlopen(call, timeout=20) as reply:
        return json.load(reply)


def eventually(condition: Callable[[], Any], within_s: float = 60.0) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found
    return found


@contextmanager
def routed(tmp_path: Path, fleet: Fleet) -> Iterator[str]:
    """A router process for `fleet`; yields its URL."""
    run = ["run_dir=r", "run_id=a", "updates=1", "prompts_per_update=1", "weights.store=s", "fleet.model=m"]
    config: Config = load("config", [*run, "router.poll_s=0.5", "router.heartbeat_s=2"])
    config.fleet = fleet
    path, ready = tmp_path / "run.yaml", tmp_path / "router.json"
    to_file(config, path)
    command = [sys.executable, "-m", "miles_mixprec.router", "--config", str(path), "--ready-file", str(ready)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": ROOT})
    try:
        eventually(ready.exists)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.terminate()
        process.wait(timeout=20)


class Registrar(threading.Thread):
    """Tells the router of every ready engine, as the engines' sidecars do."""

    def __init__(self, provider: RayProvider, router: str) -> None:
        super().__init__(daemon=True)
        self.provider, self.router, self.done = provider, router, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.3):
            for engine in self.provider.list():
                if engine.url is not None and self._ready(engine.name):
                    pool = self.provider.fleet.pools[engine.pool]
                    body = {"url": engine.url, "pool": engine.pool, "view": pool.view, "engine": engine.name}
                    body |= {"slots": pool.slots_per_engine, "weight_version": 0, "state": "serving"}
                    request(f"{self.router}/workers", body)

    def _ready(self, engine: str) -> bool:
        try:
            return self.provider.health(engine).state == "ready"
        except EngineError:  # gone since the provider listed it
            return False


def turn(router: str, key: str) -> str:
    """One turn of session `key`; returns the engine that served it."""
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    call = urllib.request.Request(
        f"{router}/generate", data=json.dumps(body).encode(), headers={"Content-Type": "application/json", KEY: key}
    )
    with urllib.request.urlopen(call, timeout=20) as reply:
        return str(reply.headers["X-Mixprec-Engine"])


def fresh_homes(router: str) -> set[str]:
    """Where twenty sessions that never were before begin."""
    return {turn(router, str(uuid.uuid4())) for _ in range(20)}


def test_engines_are_killed_replaced_and_resized_while_sessions_run(cluster: None, tmp_path: Path) -> None:
    pools = {
        "fp8": Pool(view="fp8", accelerator="h200", engines=2, slots_per_engine=500),
        "bf16": Pool(view="bf16", accelerator="h100", accelerators_per_engine=2, slots_per_engine=500),
    }
    provider = provide(tmp_path, pools)
    for pool in pools:
        provider.launch(pool)
    engines = await_engines(provider, timeout_s=90)
    assert sorted(engine.name for engine in engines) == ["bf16/0", "fp8/0", "fp8/1"]
    seen = request(f"{provider.address('bf16/0')}/server_info")
    assert len(seen["environment"]["CUDA_VISIBLE_DEVICES"].split(",")) == 2, "placed on two accelerators"

    with routed(tmp_path, provider.fleet) as router:
        request_registrar = Registrar(provider, router)
        request_registrar.start()
        eventually(lambda: len(request(f"{router}/workers")["workers"]) == 3)
        homes = {key: turn(router, key) for key in (f"session-{i}" for i in range(40))}
        assert set(homes.values()) == {"bf16/0", "fp8/0", "fp8/1"}

        url = provider.address("fp8/0")
        os.kill(request(f"{url}/server_info")["pid"], signal.SIGKILL)
        for key, home in homes.items():  # other engines' sessions go on; those of fp8/0 may use its sibling
            if home != "fp8/0":
                assert turn(router, key) == home
        eventually(lambda: provider.health("fp8/0").state == "ready" and provider.list()[0].url != url)
        eventually(lambda: provider.address("fp8/0") in [w["url"] for w in request(f"{router}/workers")["workers"]])
        eventually(lambda: "fp8/0" in fresh_homes(router))

        url = provider.address("fp8/1")
        ray.kill(provider._handles["fp8"][1].actor, no_restart=False)
        eventually(lambda: provider.health("fp8/1").state == "ready" and provider.list()[1].url not in (None, url))
        with pytest.raises((urllib.error.URLError, OSError)):
            request(f"{url}/health")

        assert [engine.name for engine in provider.resize("bf16", 2)] == ["bf16/0", "bf16/1"]
        await_engines(provider, timeout_s=60)
        eventually(lambda: "bf16/1" in fresh_homes(router))
        gone = provider.address("bf16/1")
        assert [engine.name for engine in provider.resize("bf16", 1)] == ["bf16/0"]
        with pytest.raises((urllib.error.URLError, OSError)):
            request(f"{gone}/health")
        assert turn(router, "a-new-session").split("/")[0] in pools
        request_registrar.done.set()
        request_registrar.join()

    urls = [engine.url for engine in provider.list()]
    provider.stop()
    assert provider.list() == []
    for url in urls:
        with pytest.raises((urllib.error.URLError, OSError)):
            request(f"{url}/health")


def test_capacity_that_is_not_there_is_waited_for_not_fatal(cluster: None, tmp_path: Path) -> None:
    pools = {
        "here": Pool(view="bf16", accelerator="h100", slots_per_engine=1),
        "never": Pool(view="nvfp4", accelerator="b300", slots_per_engine=1),
    }
    provider = provide(tmp_path, pools)
    for pool in pools:
        provider.launch(pool)
    eventually(lambda: provider.health("here/0").state == "ready")
    ready = await_engines(provider, timeout_s=0.5)
    assert [engine.name for engine in ready] == ["here/0"]
    assert provider.health("never/0").detail == "waits for a node with accelerator_type:B300"
    with pytest.raises(EngineError, match="engine never/0: not placed yet"):
        provider.address("never/0")
    provider.stop()


def test_a_failed_start_is_reported_not_repeated(cluster: None, tmp_path: Path) -> None:
    options = json.dumps({"fail": "RuntimeError: no kernel image for this device"})
    provider = provide(
        tmp_path, {"p": Pool(view="bf16", accelerator="h100", slots_per_engine=1, env={"FAKE_ENGINE": options})}
    )
    provider.launch("p")
    with pytest.raises(EngineError, match="pool p: engine p/0 exited with status 3: RuntimeError: no kernel image"):
        await_engines(provider, timeout_s=30)
    provider.stop()


def test_actor_options() -> None:
    pools = {
        "gpu": Pool(
            view="bf16", accelerator="h200", accelerators_per_engine=2, slots_per_engine=1, cpus=10, memory_gib=8
        ),
        "cpu": Pool(view="bf16", slots_per_engine=1),
    }
    fleet = Fleet(name="f", pools=pools)
    gpu = actor_options(fleet, "gpu")
    assert (gpu["num_gpus"], gpu["num_cpus"], gpu["memory"]) == (2, 10, 8 << 30)
    assert gpu["resources"] == {"accelerator_type:H200": 0.001}
    assert gpu["max_restarts"] == -1
    cpu = actor_options(fleet, "cpu")
    assert cpu["num_cpus"] == 1 and "num_gpus" not in cpu and "resources" not in cpu
