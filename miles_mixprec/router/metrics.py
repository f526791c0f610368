"""What the router tells of itself: Prometheus metrics and the JSON of /fleet, both computed when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from miles_mixprec.router.proxy import Proxy
from miles_mixprec.router.sessions import MemoryPins
from miles_mixprec.router.state import Engine, LiveFleet, Pool

_ENGINE_COUNTERS = {
    "sent": "Attempts sent to the engine",
    "returned": "Replies that came back whole",
    "failed": "Attempts that did not come back whole",
    "lost": "Failed attempts of which the engine knew nothing any more",
}
_BREAKERS = {"closed": 0, "half-open": 1, "open": 2}


def fleet_json(fleet: LiveFleet, pins: MemoryPins, proxy: Proxy) -> dict[str, Any]:
    """The body of `GET /fleet`."""
    now = fleet.clock()
    oldest = max((now - turn.started for turn in proxy.turns), default=0.0)
    hops = proxy.hops
    return {
        "pools": {pool.name: _pool_json(pool, fleet) for pool in fleet.pools.values()},
        "views": {name: {"version": view.version, "run": view.run} for name, view in fleet.views.items()},
        "sessions": {"pinned": len(pins.pins), "live": len(pins.live)},
        "requests": {
            "received": hops.received,
            "answered": hops.answered,
            "refused": dict(hops.refused),
            "disconnected": hops.disconnected,
            "broken": hops.broken,
            "in_flight": len(proxy.turns),
            "retried": hops.retried,
            "heartbeats": hops.heartbeats,
            "oldest_s": round(oldest, 3),
        },
    }


def _pool_json(pool: Pool, fleet: LiveFleet) -> dict[str, Any]:
    engines = {engine.name: _engine_json(engine, fleet) for engine in pool.engines.values()}
    p90 = pool.latencies.quantile(0.9)
    return {
        "view": pool.view,
        "breaker": pool.breaker,
        "draining": pool.draining,
        "share": round(pool.share, 4),
        "factor": round(pool.factor, 3),
        "slots": pool.slots,
        "limit": sum(engine["limit"] for engine in engines.values() if engine["breaker"] != "open"),
        "active": fleet.pool_active(pool),
        "turns": pool.turns,
        "turn_p90_s": None if p90 is None else round(p90, 3),
        "newest": fleet.newest(pool.view),
        "engines": engines,
    }


def _engine_json(engine: Engine, fleet: LiveFleet) -> dict[str, Any]:
    return {
        "id": engine.id,
        "url": engine.url,
        "state": engine.state,
        "breaker": engine.breaker,
        "weight_version": engine.version,
        "claimed": engine.claimed,
        "answered": engine.answered,
        "slots": engine.slots,
        "limit": fleet.limit(engine),
        "active": fleet.active.get(engine.name, 0),
        "in_flight": len(engine.in_flight),
        "running": engine.running,
        "queued": engine.queued,
        "kv_use": round(engine.kv_use, 4),
        "sent": engine.sent,
        "returned": engine.returned,
        "failed": engine.failed,
        "lost": engine.lost,
    }


class RouterCollector(Collector):
    """Prometheus metrics of one router; names start with `mixprec_router_`."""

    def __init__(self, fleet: LiveFleet, pins: MemoryPins, proxy: Proxy) -> None:
        self.fleet = fleet
        self.pins = pins
        self.proxy = proxy

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._pools()
        yield from self._engines()

    def _requests(self) -> Iterator[Metric]:
        hops = self.proxy.hops
        for name in ("received", "answered", "disconnected", "broken", "retried", "heartbeats"):
            yield CounterMetricFamily(f"mixprec_router_{name}", f"Requests {name}", value=getattr(hops, name))
        refused = CounterMetricFamily("mixprec_router_refused", "Requests the router refused", labels=["kind"])
        for kind, count in hops.refused.items():
            refused.add_metric([kind], count)
        yield refused
        now = self.fleet.clock()
        oldest = max((now - turn.started for turn in self.proxy.turns), default=0.0)
        yield GaugeMetricFamily("mixprec_router_in_flight", "Requests in flight", value=len(self.proxy.turns))
        yield GaugeMetricFamily("mixprec_router_oldest_seconds", "Age of the oldest request in flight", value=oldest)
        yield GaugeMetricFamily("mixprec_router_sessions", "Pinned sessions", value=len(self.pins.pins))
        yield GaugeMetricFamily("mixprec_router_live_sessions", "Sessions that hold a slot", value=len(self.pins.live))

    def _pools(self) -> Iterator[Metric]:
        gauges = {
            "share": (lambda pool: pool.share, "Target share of the live sessions"),
            "factor": (lambda pool: pool.factor, "Live capacity over declared slots"),
            "slots": (lambda pool: pool.slots, "Declared slots of engines that are not cut off"),
            "active": (self.fleet.pool_active, "Live sessions"),
            "breaker": (lambda pool: _BREAKERS[pool.breaker], "0 closed, 1 half-open, 2 open"),
            "newest_version": (lambda pool: self.fleet.newest(pool.view), "Newest published version of its view"),
        }
        for name, (read, text) in gauges.items():
            family = GaugeMetricFamily(f"mixprec_router_pool_{name}", text, labels=["pool", "view"])
            for pool in self.fleet.pools.values():
                family.add_metric([pool.name, pool.view], read(pool))
            yield family
        turns = CounterMetricFamily("mixprec_router_pool_turns", "Turns answered", labels=["pool", "view"])
        seconds = CounterMetricFamily(
            "mixprec_router_pool_turn_seconds", "Their latencies, summed", labels=["pool", "view"]
        )
        p90 = GaugeMetricFamily("mixprec_router_pool_turn_p90_seconds", "p90 turn latency", labels=["pool", "view"])
        for pool in self.fleet.pools.values():
            turns.add_metric([pool.name, pool.view], pool.turns)
            seconds.add_metric([pool.name, pool.view], pool.turn_seconds)
            quantile = pool.latencies.quantile(0.9)
            if quantile is not None:
                p90.add_metric([pool.name, pool.view], quantile)
        yield from (turns, seconds, p90)

    def _engines(self) -> Iterator[Metric]:
        labels = ["pool", "engine"]
        engines = list(self.fleet.engines())
        for name, text in _ENGINE_COUNTERS.items():
            counter = CounterMetricFamily(f"mixprec_router_engine_{name}", text, labels=labels)
            for engine in engines:
                counter.add_metric([engine.pool.name, engine.name], getattr(engine, name))
            yield counter
        for name in ("version", "running", "queued", "kv_use"):
            gauge = GaugeMetricFamily(f"mixprec_router_engine_{name}", f"The engine's {name}", labels=labels)
            for engine in engines:
                gauge.add_metric([engine.pool.name, engine.name], getattr(engine, name))
            yield gauge
