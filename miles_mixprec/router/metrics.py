"""What the router tells of itself: the JSON of /fleet, and the same for Prometheus, both computed when asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from miles_mixprec.router.proxy import Proxy
from miles_mixprec.router.state import Engine, LiveFleet, Pool

COUNTERS = {  # by prefix; an engine's `answered` is the weight version that it answers with
    "": ("received", "answered", "refused", "disconnected", "broken", "retried", "heartbeats"),
    "pool_": ("turns", "turn_seconds"),
    "engine_": ("sent", "returned", "failed", "lost"),
}
CODES = {"closed": 0, "half-open": 1, "open": 2, "serving": 0, "updating": 1, "draining": 2, False: 0, True: 1}


def fleet_json(proxy: Proxy) -> dict[str, Any]:
    """The body of `GET /fleet`."""
    fleet, pins, hops = proxy.fleet, proxy.pins, proxy.hops
    now = fleet.clock()
    return {
        "pools": {pool.name: _pool_json(pool, fleet) for pool in fleet.pools.values()},
        "views": {name: {"version": view.version, "run": view.run} for name, view in fleet.views.items()},
        "sessions": {"pinned": len(pins.pins), "live": len(pins.live)},
        "requests": vars(hops)
        | {
            "refused": dict(hops.refused),
            "in_flight": len(proxy.turns),
            "oldest_s": round(max((now - turn.started for turn in proxy.turns), default=0.0), 3),
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
        "turn_seconds": round(pool.turn_seconds, 3),
        "turn_p90_s": None if p90 is None else round(p90, 3),
        "newest": fleet.newest(pool.view),
        "engines": engines,
    }


def _engine_json(engine: Engine, fleet: LiveFleet) -> dict[str, Any]:
    told = ("id", "url", "state", "breaker", "claimed", "answered", "slots", "running", "queued", "kv_use")
    counted = ("sent", "returned", "failed", "lost")
    return {name: getattr(engine, name) for name in told + counted} | {
        "weight_version": engine.version,
        "limit": fleet.limit(engine),
        "active": fleet.active.get(engine.name, 0),
        "in_flight": len(engine.in_flight),
    }


class RouterCollector(Collector):
    """Every number of `fleet_json` as `mixprec_router_[pool_|engine_]<name>`; states as 0, 1, 2 (see CODES)."""

    def __init__(self, proxy: Proxy) -> None:
        self.proxy = proxy

    def collect(self) -> Iterator[Metric]:
        told = fleet_json(self.proxy)
        requests = told["requests"] | {f"{name}_sessions": count for name, count in told["sessions"].items()}
        refused = requests.pop("refused")
        yield from _families("", (), {(): requests})
        yield from _families("", ("kind",), {(kind,): {"refused": count} for kind, count in refused.items()})
        pools: dict[tuple[str, ...], Any] = {(name, pool["view"]): pool for name, pool in told["pools"].items()}
        yield from _families("pool_", ("pool", "view"), pools)
        engines: dict[tuple[str, ...], Any] = {
            (pool, name): engine for (pool, _), found in pools.items() for name, engine in found["engines"].items()
        }
        yield from _families("engine_", ("pool", "engine"), engines)


def _families(
    prefix: str, labels: tuple[str, ...], rows: Mapping[tuple[str, ...], Mapping[str, Any]]
) -> Iterator[Metric]:
    families: dict[str, Any] = {}
    for values, row in rows.items():
        for name, value in row.items():
            number = CODES.get(value, value) if isinstance(value, (str, bool)) else value
            if isinstance(number, (int, float)):
                if name not in families:
                    kind = CounterMetricFamily if name in COUNTERS[prefix] else GaugeMetricFamily
                    families[name] = kind(f"mixprec_router_{prefix}{name}", name.replace("_", " "), labels=labels)
                families[name].add_metric(list(values), number)
    yield from families.values()
