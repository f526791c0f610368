"""From verdicts to actions: drain a pool, ask for a save, ask for the end.

The state is the run log alone. `check` replays it, so it can be called after every update, by any process, and again
after a restart.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from miles_mixprec.config import GUARD_ACTIONS, Router
from miles_mixprec.config import Guard as Thresholds
from miles_mixprec.errors import EngineError
from miles_mixprec.guard.collapse import Level, Verdict, judge
from miles_mixprec.guard.signals import read_signals
from miles_mixprec.headers import authorization

DECISION = "guard.json"


@dataclass(frozen=True)
class Decision:
    """What the run is to do after `update`; `<run_dir>/guard.json` holds the same."""

    update: int
    level: str  # baseline | healthy | warning | collapse
    mode: str | None
    reasons: tuple[str, ...]
    quarantined: tuple[str, ...]  # every pool drained so far
    save: bool  # a warning began at this update or the one before: save while the weights are good
    stop: bool  # the run has collapsed and not come back


def check(run_dir: str | os.PathLike[str], thresholds: Thresholds, drain: Callable[[str], None]) -> Decision | None:
    """Judge the run up to its newest finished update, drain faulty pools, write the decision and return it.

    None while no update has finished. What `drain` raises passes before the decision is written, so the next call
    tries again.
    """
    verdicts = judge(thresholds, read_signals(run_dir))
    if not verdicts:
        return None
    path = Path(run_dir) / DECISION
    drained = json.loads(path.read_bytes())["quarantined"] if path.exists() else []
    decision = decide(verdicts, thresholds)
    for pool in decision.quarantined:
        if pool not in drained:
            drain(pool)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(asdict(decision), indent=2) + "\n")
    partial.replace(path)
    return decision


def decide(verdicts: list[Verdict], thresholds: Thresholds) -> Decision:
    """What `thresholds.action` allows to be done about a run's verdicts."""
    last = verdicts[-1]
    # Two updates long, so that a trainer which looks once per update sees it whenever it looks.
    begun = any(b.level >= Level.WARNING > a.level for a, b in pairwise(verdicts[-3:]))
    rank = GUARD_ACTIONS.index(thresholds.action)
    standing = list(takewhile(lambda verdict: verdict.level == Level.COLLAPSE, reversed(verdicts)))
    faulty = dict.fromkeys(pool for verdict in verdicts for pool in verdict.pools_to_quarantine)
    return Decision(
        update=last.update,
        level=last.level.name.lower(),
        mode=last.mode,
        reasons=last.reasons,
        quarantined=tuple(faulty) if rank >= GUARD_ACTIONS.index("quarantine") else (),
        save=rank >= GUARD_ACTIONS.index("save") and begun,
        stop=rank >= GUARD_ACTIONS.index("stop") and len(standing) >= thresholds.stop_after,
    )


def drain_through(url: str, router: Router) -> Callable[[str], None]:
    """The `drain` of `check`, by the router at `url`: live sessions go on, new ones go to other pools.

    Raises EngineError when the router does not answer or refuses, ConfigError at once without its token.
    """
    headers = authorization(router, admin=True)

    def drain(pool: str) -> None:
        request = urllib.request.Request(f"{url}/pools/{pool}/drain", data=b"", headers=headers, method="POST")
        try:
            urllib.request.urlopen(request, timeout=30).close()
        except OSError as error:
            raise EngineError(
                f"pool {pool}: the router at {url} did not drain it ({error}); is it up, and has it the same tokens?"
            ) from error

    return drain
