"""When a run may start, and engines that exist already."""

import http.server
import threading
from collections.abc import Iterator, Sequence

import pytest

from miles_mixprec.config import Fleet, Pool
from miles_mixprec.errors import EngineError
from miles_mixprec.providers.base import Engine, Health, await_engines
from miles_mixprec.providers.static import StaticProvider


class Scripted:
    """A provider whose engines go through given states, one per look, and are placed from a given look on."""

    placed_at = 0

    def __init__(self, minimum: dict[str, int], states: dict[str, list[str]]) -> None:
        names = [name.split("/")[0] for name in states]
        pools = {
            name: Pool(view="bf16", slots_per_engine=1, engines=names.count(name), min_engines=minimum.get(name, 0))
            for name in dict.fromkeys(names)
        }
        self.fleet = Fleet(name="f", model="m", context_length=8, pools=pools)
        self.states = states
        self.looks = 0

    def list(self) -> Sequence[Engine]:
        self.looks += 1
        url = "http://placed" if self.looks >= self.placed_at else None
        return [Engine(name.split("/")[0], int(name.split("/")[1]), url) for name in self.states]

    def health(self, name: str) -> Health:
        states = self.states[name]
        state = states.pop(0) if len(states) > 1 else states[0]
        return Health(state, f"pool x: {name} said so")  # type: ignore[arg-type]


def start(minimum: dict[str, int], states: dict[str, list[str]]) -> list[str]:
    found: list[str] = []
    await_engines(
        Scripted(minimum, states),  # type: ignore[arg-type]
        timeout_s=0.05,
        poll_s=0.005,
        on_ready=lambda engine: found.append(engine.name),
    )
    return found


def test_all_ready() -> None:
    assert start({}, {"a/0": ["starting", "ready"], "b/0": ["ready"]}) == ["b/0", "a/0"]


def test_an_engine_placed_between_two_looks_is_ready_with_its_address() -> None:
    provider = Scripted({}, {"a/0": ["ready"]})
    provider.placed_at = 2
    engines = await_engines(provider, timeout_s=5, poll_s=0.005)  # type: ignore[arg-type]
    assert [engine.url for engine in engines] == ["http://placed"]


def test_a_pool_that_never_arrives_does_not_block() -> None:
    assert start({"a": 1}, {"a/0": ["ready"], "a/1": ["starting"], "b/0": ["starting"]}) == ["a/0"]


def test_too_few_of_a_pool_stop_the_start() -> None:
    with pytest.raises(
        EngineError, match=r"pool b: 0 of 1 engines needed were ready after 0\.05 s \(b/0: .*min_engines"
    ):
        start({"b": 1}, {"a/0": ["ready"], "b/0": ["starting"]})


def test_nothing_ready_stops_the_start() -> None:
    with pytest.raises(EngineError, match="pool a: 0 of 1 engines needed"):
        start({}, {"a/0": ["starting"], "b/0": ["starting"]})


def test_a_failed_engine_stops_the_start_at_once() -> None:
    with pytest.raises(EngineError, match="pool x: b/0 said so"):
        start({}, {"a/0": ["starting"], "b/0": ["failed"]})


@pytest.fixture
def healthy() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_static_engines(healthy: str) -> None:
    urls = [f"{healthy}/", "http://127.0.0.1:1"]
    fleet = Fleet(name="f", provider="static", pools={"p": Pool(view="bf16", slots_per_engine=1, urls=urls)})
    provider = StaticProvider(fleet)
    assert provider.list() == []
    assert [engine.name for engine in provider.launch("p")] == ["p/0"]
    assert provider.address("p/0") == healthy
    assert provider.health("p/0").state == "ready"
    provider.resize("p", 2)
    assert provider.health("p/1") == Health("starting", "http://127.0.0.1:1/health does not answer")
    with pytest.raises(EngineError, match=r"pool p: 3 engines wanted, 2 known; add to fleet\.pools\.p\.urls"):
        provider.resize("p", 3)
    provider.stop()
    with pytest.raises(EngineError, match="engine p/0: not in use"):
        provider.address("p/0")
