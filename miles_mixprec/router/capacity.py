"""Live capacity of the pools: how many sessions each should hold now, and how likely a new session goes there.

Declared slots are the prior. Each control period the load that the engines report corrects them:

    pressure  = max(p90 turn latency / target, KV use / KV_HIGH, queued / running / QUEUE_HIGH)
    factor   -> active / (pressure * slots)   when pressure > 1        (what the pool can hold, measured)
    factor   -> factor * RECOVERY             when pressure < RELIEF   (never above 1)
    factor    = factor                        between the two          (hysteresis)

The first line does not wind up: while pinned sessions drain, `active / pressure` stays where it is. Numeric example:
48 slots, 48 active, p90 13 s against a target of 10 s: the pool is worth 48 / 1.3 = 37 sessions, also while it drains.

Weights steer concurrency, not counts. A pool whose sessions last twice as long holds twice the sessions at equal
arrivals, so a new session goes where live sessions are short of the pool's share of them:

    weight = max(0, share * (active sessions + headroom) - the pool's active sessions)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

KV_HIGH = 0.9  # share of the KV cache beyond which engines evict and prefill again
QUEUE_HIGH = 0.25  # queued requests per running one
RELIEF = 0.85  # pressure below which capacity is given back
APPROACH = 0.3  # share of the way to the measured capacity that one period goes
RECOVERY = 1.05  # growth per period under relief
FLOOR = 0.1  # a pool keeps this share of its slots, or nothing would show its recovery
RAMP_S = 60.0  # a new engine takes its full slots after this long
HEADROOM = 0.05  # share of the fleet's capacity, in new sessions, over which weights are spread


@dataclass(frozen=True)
class Load:
    """What a pool's engines did in the last period. `active` counts sessions; None means nothing was observed."""

    active: int
    running: int = 0
    queued: int = 0
    kv_use: float = 0.0  # largest of the pool's engines, 0..1
    turn_p90_s: float | None = None


def pressure(load: Load, target_s: float) -> float:
    """How far the pool is beyond (above 1) or below its limits; the worst of latency, KV cache and queue.

    `target_s` is the p90 latency of a turn that is aimed at, `router.turn_latency_target_s`.
    """
    latency = 0.0 if load.turn_p90_s is None else load.turn_p90_s / target_s
    queue = load.queued / max(load.running, 1) / QUEUE_HIGH
    return max(latency, load.kv_use / KV_HIGH, queue if load.queued > 1 else 0.0)


def adjust(factor: float, slots: float, load: Load, target_s: float) -> float:
    """The pool's next live factor, in [FLOOR, 1], from the present one and a period's load."""
    stress = pressure(load, target_s)
    if stress > 1:
        measured = load.active / (stress * slots)
        factor += APPROACH * min(measured - factor, 0.0)
    elif stress < RELIEF:
        factor *= RECOVERY
    return min(max(factor, FLOOR), 1.0)


def ramp(age_s: float) -> float:
    """Share of its slots that an engine takes `age_s` seconds after it joined a fleet at work."""
    return min(1.0, max(FLOOR, age_s / RAMP_S))


def shares(capacity: Mapping[str, float], caps: Mapping[str, float]) -> dict[str, float]:
    """Shares of the live sessions, proportional to `capacity`, none above its cap, summing to 1 where caps allow it.

    What a capped pool cannot take goes to the others in proportion (water-filling). Caps that together leave room
    for less than all sessions are scaled up: sessions must go somewhere.
    """
    room = {name: caps.get(name, 1.0) for name, size in capacity.items() if size > 0}
    if not room:
        return dict.fromkeys(capacity, 0.0)
    excess = max(1.0, 1.0 / sum(room.values()))
    room = {name: cap * excess for name, cap in room.items()}
    result, left = dict.fromkeys(capacity, 0.0), 1.0
    names = sorted(room, key=lambda name: room[name] / capacity[name])  # the order in which caps are reached
    for i, name in enumerate(names):
        wanted = capacity[name] / sum(capacity[other] for other in names[i:]) * left
        result[name] = min(wanted, room[name])
        left -= result[name]
    return result


def weights(capacity: Mapping[str, float], caps: Mapping[str, float], active: Mapping[str, int]) -> dict[str, float]:
    """Weights of a new session over the pools, in sessions: each pool's room up to its share of the live sessions."""
    target = shares(capacity, caps)
    total = sum(active.get(name, 0) for name in capacity) + max(1.0, HEADROOM * sum(capacity.values()))
    return {name: max(0.0, share * total - active.get(name, 0)) for name, share in target.items()}


_EDGES = tuple(0.001 * 1.15**i for i in range(120))  # 1 ms .. 5 h, 15% apart


@dataclass
class Latencies:
    """Turn latencies in seconds over an exponentially fading window, in buckets 15% apart."""

    counts: list[float] = field(default_factory=lambda: [0.0] * (len(_EDGES) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_EDGES, seconds)] += 1.0

    def fade(self, keep: float) -> None:
        """Weigh everything seen so far by `keep` (0..1)."""
        self.counts = [count * keep for count in self.counts]

    def quantile(self, q: float) -> float | None:
        """The q-quantile (upper edge of its bucket); None while the window holds fewer than five turns."""
        total = sum(self.counts)
        if total < 5:
            return None
        seen = 0.0
        for edge, count in zip(_EDGES, self.counts, strict=False):
            seen += count
            if seen >= q * total:
                return edge
        return _EDGES[-1]
