"""Real processes, cheap ones: the fake engine takes SGLang's arguments."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_mixprec.config import Fleet, Pool
from miles_mixprec.errors import EngineError
from miles_mixprec.providers.base import await_engines
from miles_mixprec.providers.local import LocalProvider

FAKE = str(Path(__file__).with_name("fake_server.py"))


def pool(**more: Any) -> Pool:
    return Pool(**({"view": "bf16", "slots_per_engine": 4} | more))


@pytest.fixture
def provide(tmp_path: Path) -> Iterator[Callable[..., LocalProvider]]:
    started = []

    def build(pools: dict[str, Pool], **options: Any) -> LocalProvider:
        fleet = Fleet(name="f", model="m", context_length=64, pools=pools)
        started.append(LocalProvider(fleet, tmp_path, server=(FAKE,), grace_s=0.5, **options))
        for name in pools:
            started[-1].launch(name)
        return started[-1]

    yield build
    for provider in started:
        provider.stop()


def info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/server_info") as reply:
        return json.load(reply)


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def test_launch_address_and_stop(provide: Callable[..., LocalProvider], tmp_path: Path) -> None:
    provider = provide({"bf16": pool(engines=2), "fp8": pool(env={"TEST_POOL": "fp8"})}, models={"bf16": "/ckpt"})
    engines = await_engines(provider, timeout_s=30, poll_s=0.05)
    assert sorted(engine.name for engine in engines) == ["bf16/0", "bf16/1", "fp8/0"]
    assert [engine.name for engine in provider.list()] == ["bf16/0", "bf16/1", "fp8/0"]
    assert len({engine.url for engine in engines}) == 3
    seen = info(provider.address("fp8/0"))
    assert seen["environment"]["TEST_POOL"] == "fp8"
    assert seen["environment"]["SGLANG_USE_CPU_ENGINE"] == "1"
    assert seen["argv"][seen["argv"].index("--model-path") + 1] == "/ckpt"
    assert (tmp_path / "logs" / "engine-bf16-1.log").exists()
    pids = [info(engine.url or "")["pid"] for engine in engines]
    provider.stop()
    provider.stop()
    assert all(gone(pid) for pid in pids)
    assert provider.list() == []


def test_a_failed_start_names_pool_cause_and_remedy(provide: Callable[..., LocalProvider]) -> None:
    options = json.dumps({"fail": "ValueError: --kv-cache-dtype fp8 is not supported"})
    provider = provide({"good": pool(), "bad": pool(env={"FAKE_ENGINE": options})})
    with pytest.raises(EngineError) as error:
        await_engines(provider, timeout_s=30, poll_s=0.05)
    text = str(error.value)
    assert text.startswith(
        "pool bad: engine bad/0 exited with status 3: ValueError: --kv-cache-dtype fp8 is not supported;"
    )
    assert "correct fleet.pools.bad" in text
    assert "\n" not in text


def test_resize_and_a_death(provide: Callable[..., LocalProvider]) -> None:
    provider = provide({"p": pool()})
    assert [engine.name for engine in provider.resize("p", 3)] == ["p/0", "p/1", "p/2"]
    await_engines(provider, timeout_s=30, poll_s=0.05)
    kept, dropped = info(provider.address("p/0"))["pid"], info(provider.address("p/2"))["pid"]
    provider.resize("p", 1)
    assert gone(dropped) and alive(kept)
    with pytest.raises(EngineError, match="engine p/2: not in use; this provider has p/0"):
        provider.address("p/2")
    os.kill(kept, signal.SIGKILL)
    assert gone(kept)
    deadline = time.monotonic() + 10
    while provider.health("p/0").state != "failed" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert provider.health("p/0").state == "failed"


def test_stop_takes_grandchildren_and_the_deaf(provide: Callable[..., LocalProvider], tmp_path: Path) -> None:
    child = tmp_path / "child"
    options = json.dumps({"ignore_sigterm": True, "child": str(child)})
    provider = provide({"p": pool(env={"FAKE_ENGINE": options})})
    await_engines(provider, timeout_s=30, poll_s=0.05)
    engine, grandchild = info(provider.address("p/0"))["pid"], int(child.read_text())
    assert alive(engine) and alive(grandchild)
    provider.stop()
    assert gone(engine) and gone(grandchild)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_parent_that_dies(tmp_path: Path, number: signal.Signals) -> None:
    program = f"""
import sys, time
from miles_mixprec.config import Fleet, Pool
from miles_mixprec.providers.base import await_engines
from miles_mixprec.providers.local import LocalProvider
pool = Pool(view="bf16", slots_per_engine=1, env={{"FAKE_ENGINE": '{{"child": "{tmp_path}/child"}}'}})
fleet = Fleet(name="f", model="m", context_length=64, pools={{"p": pool}})
provider = LocalProvider(fleet, "{tmp_path}", server=("{FAKE}",), grace_s=0.5)
provider.launch("p")
print(await_engines(provider, timeout_s=30, poll_s=0.05)[0].url, flush=True)
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    engine = info(parent.stdout.readline().strip())["pid"]
    grandchild = int((tmp_path / "child").read_text())
    parent.send_signal(number)
    parent.wait()
    assert gone(engine) and gone(grandchild)


def test_accelerators_are_handed_out_once(provide: Callable[..., LocalProvider]) -> None:
    gpu = {"accelerator": "h100"}
    provider = provide({"a": pool(engines=2, **gpu), "b": pool(accelerators_per_engine=2, **gpu)})
    await_engines(provider, timeout_s=30, poll_s=0.05)

    def devices() -> dict[str, str]:
        return {e.name: info(e.url or "")["environment"]["CUDA_VISIBLE_DEVICES"] for e in provider.list()}

    assert devices() == {"a/0": "0", "a/1": "1", "b/0": "2,3"}
    provider.resize("a", 1)
    provider.resize("b", 2)
    await_engines(provider, timeout_s=30, poll_s=0.05)
    assert devices() == {"a/0": "0", "b/0": "2,3", "b/1": "1,4"}
