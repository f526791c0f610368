"""What the router costs: against Miles' router and sglang_router, before the same fake engines, in the same run.

    python benchmarks/router.py [--rounds 3] [--seconds 4] [--only ours,miles,sglang]

Engines and load are bare protocols on uvloop, each in its own process, so that the router is what is measured. Every
round measures every router once, in turn; the table gives medians over rounds. CPU is the router's own, user and
system; memory is its peak resident set.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import uvloop

from miles_mixprec.providers.process import free_port

ENGINES = 2
SESSIONS = 256
SMALL, MEGABYTE = 512, 2**20


def generate(size: int) -> bytes:
    """A request whose reply has about `size` bytes; in a field that every router passes on."""
    return json.dumps({"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": size}}).encode()


# -- the fake engine ----------------------------------------------------------------------------------------------


class EngineProtocol(asyncio.Protocol):
    """Answers `POST` with as many bytes as the body's `max_new_tokens` asks, and the questions that routers put."""

    replies: dict[bytes, bytes] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: Any) -> None:  # uvloop's transports share no base class with asyncio's
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, found, rest = self.buffer.partition(b"\r\n\r\n")
            if not found:
                return
            lower = head.lower()
            length = int(_field(lower, b"content-length") or 0)
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            self.transport.write(self.answer(lower, rest[:length]))

    def answer(self, head: bytes, body: bytes) -> bytes:
        if head.startswith(b"post"):
            size = body.partition(b'"max_new_tokens":')[2].partition(b"}")[0].partition(b",")[0].strip()
            if size not in self.replies:
                self.replies[size] = _reply(b'{"text":"' + b"x" * int(size) + b'","meta_info":{"weight_version":"0"}}')
            return self.replies[size]
        if b" /v1/loads" in head:
            return _reply(b'{"loads":[{"num_running_reqs":1,"num_waiting_reqs":0,"token_usage":0.1}]}')
        info = {"model_path": "fake", "served_model_name": "fake", "weight_version": "0", "tp_size": 1, "dp_size": 1}
        return _reply(json.dumps(info).encode())


def _field(head: bytes, name: bytes) -> bytes | None:
    start = head.find(b"\r\n" + name + b":")
    return None if start < 0 else head[start + len(name) + 3 :].split(b"\r\n", 1)[0].strip()


def _reply(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def run_engine(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(EngineProtocol, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


# -- the load -----------------------------------------------------------------------------------------------------


class LoadProtocol(asyncio.BufferedProtocol):
    """One connection, one request at a time; counts reply bytes into a fixed buffer."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(2**20))
        self.done: asyncio.Future[int] | None = None
        self.head = b""
        self.missing = -1  # body bytes to come; -1: still in the head
        self.size = 0

    def connection_made(self, transport: Any) -> None:  # uvloop's transports share no base class with asyncio's
        self.transport = transport

    def get_buffer(self, hint: int) -> memoryview:
        return self.view

    def buffer_updated(self, count: int) -> None:
        if self.missing < 0:
            self.head += bytes(self.view[:count])
            end = self.head.find(b"\r\n\r\n")
            if end < 0:
                return
            lower = self.head[:end].lower()
            assert lower.startswith(b"http/1.1 200"), self.head[:300]
            length = _field(lower, b"content-length")
            if length is None:
                raise RuntimeError("the load generator reads only replies with a length")
            self.missing = self.size = int(length)
            count = len(self.head) - end - 4
        self.missing -= count
        if self.missing == 0 and self.done is not None:
            self.done.set_result(self.size)

    def connection_lost(self, error: Exception | None) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_exception(error or ConnectionResetError("closed in mid-reply"))

    async def ask(self, request: bytes) -> int:
        self.head, self.missing = b"", -1
        self.done = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.done


def _request(session: int, size: int, port: int) -> bytes:
    body = generate(size)
    head = (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"X-SMG-Routing-Key: session-{session}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def run_load(port: int, seconds: float, connections: int, size: int, rate: float) -> dict[str, float]:
    """Closed loop over `connections`; with a `rate` (requests per second), evenly spaced instead."""
    loop = asyncio.get_running_loop()
    lines = [(await loop.create_connection(LoadProtocol, "127.0.0.1", port))[1] for _ in range(connections)]
    requests = [_request(session, size, port) for session in range(SESSIONS)]
    latencies: list[float] = []
    received = 0
    began = loop.time()
    end = began + seconds

    async def closed(index: int) -> None:
        nonlocal received
        i = index
        while loop.time() < end:
            start = time.perf_counter()
            size = await lines[index].ask(requests[i % SESSIONS])
            received += size
            latencies.append(time.perf_counter() - start)
            i += connections

    async def open_loop() -> None:
        free, tasks = list(lines), set()

        async def one(line: LoadProtocol, i: int) -> None:
            start = time.perf_counter()
            await line.ask(requests[i % SESSIONS])
            latencies.append(time.perf_counter() - start)
            free.append(line)

        for i in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, began + i / rate - loop.time()))
            if free:
                task = asyncio.ensure_future(one(free.pop(), i))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    await (open_loop() if rate else asyncio.gather(*(closed(i) for i in range(connections))))
    took = loop.time() - began
    latencies.sort()
    return {
        "rps": len(latencies) / took,
        "mb_s": received / took / MEGABYTE,
        "requests": len(latencies),
        "p50_ms": 1e3 * latencies[len(latencies) // 2],
        "p99_ms": 1e3 * latencies[int(len(latencies) * 0.99)],
    }


# -- the routers --------------------------------------------------------------------------------------------------


def run_miles(port: int) -> None:
    from argparse import Namespace

    import uvicorn
    from miles.router.router import MilesRouter

    args = Namespace(
        sglang_server_concurrency=512,
        rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1,
        miles_router_timeout=None,
        miles_router_middleware_paths=[],
        rollout_health_check_interval=30,
        miles_router_health_check_failure_threshold=3,
    )
    uvicorn.run(MilesRouter(args).app, host="127.0.0.1", port=port, log_level="error")


def command(router: str, port: int, engines: list[int], folder: Path) -> list[str]:
    here = [sys.executable, __file__, "--port", str(port)]
    if router == "miles":
        return [*here, "--role", "miles"]
    if router == "sglang":
        urls = [f"http://127.0.0.1:{engine}" for engine in engines]
        launch = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        quiet = ["--log-level", "error", "--prometheus-port", str(free_port())]
        return [*launch, "--policy", "manual", "--worker-urls", *urls, *quiet]
    pools = {"a": {"view": "bf16", "slots_per_engine": 4096, "engines": 1}}
    pools["b"] = dict(pools["a"])
    tree = {
        "fleet": {"name": "bench", "model": "m", "context_length": 1024, "pools": pools},
        "algo": {"name": "bench"},
        "weights": {"store": str(folder)},
        "router": {"port": port},
        **{"run_dir": str(folder), "run_id": "bench", "updates": 1, "prompts_per_update": 1},
    }
    config = folder / "router.json"  # JSON is YAML
    config.write_text(json.dumps(tree))
    return [sys.executable, "-m", "miles_mixprec.router", "--config", str(config), "--log-level", "error"]


@contextmanager
def process(argv: list[str], port: int | None) -> Iterator[psutil.Process]:
    child = subprocess.Popen(argv, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        if port is not None:
            _await(lambda: socket.create_connection(("127.0.0.1", port), 1).close(), child)
        yield psutil.Process(child.pid)
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _await(step: Any, child: subprocess.Popen[bytes], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while True:
        try:
            return step()
        except OSError:
            if time.monotonic() > end or child.poll() is not None:
                raise
            time.sleep(0.2)


def register(router: str, port: int, engines: list[int]) -> None:
    for pool, engine in zip("ab", engines, strict=True):
        url = f"http://127.0.0.1:{engine}"
        if router == "miles":
            call(port, f"/add_worker?url={url}", {})
        elif router == "ours":
            call(port, "/workers", {"url": url, "pool": pool, "view": "bf16", "slots": 4096})
    end = time.monotonic() + 60
    while True:
        try:
            call(port, "/generate", json.loads(generate(SMALL)))
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def call(port: int, path: str, body: dict[str, Any]) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=30).read()


# -- measuring ----------------------------------------------------------------------------------------------------

PHASES = {  # name: connections, reply bytes, rate
    "small": (32, SMALL, 0.0),
    "200/s": (32, SMALL, 200.0),
    "1 MB": (8, MEGABYTE, 0.0),
    "50 MB": (2, 50 * MEGABYTE, 0.0),
}


def load(port: int, seconds: float, phase: str) -> dict[str, float]:
    connections, size, rate = PHASES[phase]
    argv = [sys.executable, __file__, "--role", "load", "--port", str(port), "--seconds", str(seconds)]
    argv += ["--connections", str(connections), "--size", str(size), "--rate", str(rate)]
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)


def measure(router: str, engines: list[int], seconds: float) -> dict[str, dict[str, float]]:
    result = {}
    with tempfile.TemporaryDirectory() as folder:
        port = engines[0] if router == "direct" else free_port()
        argv = None if router == "direct" else command(router, port, engines, Path(folder))
        with process(argv or ["sleep", "600"], None if argv is None else port) as running:
            if argv is not None:
                register(router, port, engines)
                load(port, 1.0, "small")
            for phase in PHASES:
                before = running.cpu_times()
                found = load(port, seconds, phase)
                after = running.cpu_times()
                cpu = after.user + after.system - before.user - before.system
                found["cpu_us"] = 1e6 * cpu / found["requests"]
                found["rss_mb"] = _peak(running.pid)
                result[phase] = found
    return result


def _peak(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def table(results: dict[str, list[dict[str, dict[str, float]]]]) -> str:
    def median(router: str, phase: str, key: str) -> float:
        return statistics.median(one[phase][key] for one in results[router])

    lines = ["| | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]

    def row(text: str, phase: str, key: str, form: str, minus_direct: bool = False) -> None:
        base = median("direct", phase, key) if minus_direct else 0.0
        cells = [form.format(median(router, phase, key) - base) for router in results]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")

    row("small replies, req/s", "small", "rps", "{:,.0f}")
    row("small replies, p99 ms at 32 connections", "small", "p99_ms", "{:.1f}")
    row("small replies, router CPU µs per request", "small", "cpu_us", "{:.0f}")
    row("added p50 ms at 200 req/s", "200/s", "p50_ms", "{:.2f}", minus_direct=True)
    row("added p99 ms at 200 req/s", "200/s", "p99_ms", "{:.2f}", minus_direct=True)
    for phase in ("1 MB", "50 MB"):
        row(f"{phase} replies, MB/s", phase, "mb_s", "{:,.0f}")
        row(f"{phase} replies, router CPU µs per reply", phase, "cpu_us", "{:,.0f}")
        row(f"peak memory after {phase} replies, MB", phase, "rss_mb", "{:,.0f}")
    return "\n".join(lines)


FLEET = {"h100-fp8": 128, "h200-fp8": 256, "b200": 256, "b300": 384, "a100": 48, "rtx": 48, "h100": 128, "h200": 128}


def assignment() -> str:
    """Cost, share error and movement of the hash itself, on eight pools of the published sizes."""
    from miles_mixprec.router.assignment import best, table

    keys = [f"session-{i}" for i in range(10_000)]
    nodes = table(FLEET)
    chosen, times = [], []
    for start in range(0, len(keys), 100):
        began = time.perf_counter()
        chosen += [best(key, nodes) for key in keys[start : start + 100]]
        times.append((time.perf_counter() - began) / 100)
    total = sum(FLEET.values())
    error = max(abs(chosen.count(name) / len(keys) - weight / total) for name, weight in FLEET.items())
    resized = FLEET | {"b300": 480}
    moved = sum(a != best(key, table(resized)) for a, key in zip(chosen, keys, strict=True)) / len(keys)
    optimum = 480 / sum(resized.values()) - 384 / total
    return (
        f"assignment {1e6 * statistics.median(times):.1f} µs (least of 100 batches {1e6 * min(times):.1f}); "
        f"largest share error {100 * error:.2f} points at 10,000 sessions; "
        f"b300 grown by a quarter: {100 * moved:.2f}% of sessions move, optimum {100 * optimum:.2f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("main", "engine", "load", "miles"), default="main", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--connections", type=int, default=32, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=SMALL, help=argparse.SUPPRESS)
    parser.add_argument("--rate", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement")
    parser.add_argument("--only", default="ours,miles,sglang")
    arguments = parser.parse_args()
    if arguments.role == "engine":
        uvloop.run(run_engine(arguments.port))
    elif arguments.role == "miles":
        run_miles(arguments.port)
    elif arguments.role == "load":
        a = arguments
        print(json.dumps(uvloop.run(run_load(a.port, a.seconds, a.connections, a.size, a.rate))))
    else:
        compare(arguments.only.split(","), arguments.rounds, arguments.seconds)


def compare(routers: list[str], rounds: int, seconds: float) -> None:
    engines = [free_port() for _ in range(ENGINES)]
    with (
        process([sys.executable, __file__, "--role", "engine", "--port", str(engines[0])], engines[0]),
        process([sys.executable, __file__, "--role", "engine", "--port", str(engines[1])], engines[1]),
    ):
        results: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in ["direct", *routers]}
        for _ in range(rounds):
            for name, found in results.items():
                found.append(measure(name, engines, seconds))
    print(table(results))
    print(assignment())


if __name__ == "__main__":
    main()
