"""Weighted rendezvous hashing: which pool, then which engine, a new session goes to.

Every node draws an exponential waiting time for every key, from a hash of the two, at a rate equal to its weight;
the node whose time runs out first wins (Thaler and Ravishankar 1998; the logarithmic weights are Schindelhauer and
Schomaker's, 2005):

    u = max(xxh3_64(key, seed = xxh3_64(node)), 1) / 2^64    in (0, 1)
    t = -ln(u) / weight                                      smallest t wins

    >>> best("session-7", table({"fp8": 3.0, "bf16": 1.0}))
    'fp8'

Share error: a node of share s gets a binomial count of n independent keys, so its share is off by sqrt(s (1 - s) / n)
(standard deviation): at most 0.5 percentage points at n = 10,000. Movement: changing one node's weight from share s to
s' moves a fraction |s' - s| of the keys, all of them to or from that node, which is the least that any rule can move.
The result depends on nothing but its arguments: no process seed, no insertion order, no Python version.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log

from xxhash import xxh3_64_intdigest

Table = tuple[tuple[str, int, float], ...]
"""Nodes of positive weight by name: name, hash seed, -1 / weight. Built once per change of weights by `table`."""

_SCALE = 2.0**-64
_LOG_SCALE = log(_SCALE)


def table(weights: Mapping[str, float]) -> Table:
    """The nodes of `weights` (any unit, need not sum to 1) whose weight is above zero, ready for `best` and `rank`."""
    positive = sorted((name, weight) for name, weight in weights.items() if weight > 0)
    return tuple((name, xxh3_64_intdigest(name), -1.0 / weight) for name, weight in positive)


def best(key: str, nodes: Table) -> str | None:
    """The node that `key` belongs to; None when there is no node."""
    data, ln, digest, scale = key.encode(), log, xxh3_64_intdigest, _LOG_SCALE
    winner, least = None, float("inf")
    for name, seed, rate in nodes:
        time = (ln(digest(data, seed) or 1) + scale) * rate
        if time < least:
            winner, least = name, time
    return winner


def rank(key: str, nodes: Table) -> list[str]:
    """All nodes, the one that `key` belongs to first, then those it falls to if earlier ones are full or gone."""
    data = key.encode()
    times = [((log(xxh3_64_intdigest(data, seed) or 1) + _LOG_SCALE) * rate, name) for name, seed, rate in nodes]
    times.sort()
    return [name for _, name in times]
