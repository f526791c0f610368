from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer
from run_folder import write_run
from traces import flat, grpo_mixed, ramp, run, sc_mixed

from miles_mixprec.config import Fleet, Pool, Router
from miles_mixprec.config import Guard as Thresholds
from miles_mixprec.errors import EngineError
from miles_mixprec.guard.collapse import Level, Verdict, judge
from miles_mixprec.guard.signals import MetricsLog
from miles_mixprec.guard.watch import check, decide, drain_through
from miles_mixprec.router.server import PROXY, build_app


def collapse(n: int) -> float:
    return 0.4 if n < 12 else 0.05


def growth(n: int) -> float:
    return 1.0 if n < 12 else 20.0


@pytest.mark.parametrize(
    ("action", "save", "stop"),
    [("warn", False, False), ("quarantine", False, False), ("save", True, False), ("stop", True, True)],
)
def test_an_action_includes_those_before_it(action: str, save: bool, stop: bool) -> None:
    verdicts = judge(Thresholds(), sc_mixed())
    thresholds = Thresholds(action=action, stop_after=1)
    decisions = [decide(verdicts[: n + 1], thresholds) for n in range(len(verdicts))]
    assert any(d.save for d in decisions) == save
    assert any(d.stop for d in decisions) == stop


def test_asks_to_save_for_two_updates_of_a_warning_and_before_the_stop() -> None:
    verdicts = judge(Thresholds(), grpo_mixed())
    decisions = [decide(verdicts[: n + 1], Thresholds(action="stop", stop_after=1)) for n in range(len(verdicts))]
    saves = [d.update for d in decisions if d.save]
    stops = [d.update for d in decisions if d.stop]
    assert saves == [saves[0], saves[0] + 1]
    assert saves[0] < stops[0]


@pytest.mark.parametrize(("healed_at", "stops"), [(None, [18, 19, 20, 21, 22, 23]), (17, [22, 23])])
def test_only_a_collapse_that_stands_stops_a_run(healed_at: int | None, stops: list[int]) -> None:
    levels = [Level.COLLAPSE if n >= 14 and n != healed_at else Level.HEALTHY for n in range(24)]
    verdicts = [Verdict(update=n, level=level) for n, level in enumerate(levels)]
    thresholds = Thresholds(action="stop", stop_after=5)
    decisions = [decide(verdicts[: n + 1], thresholds) for n in range(24)]
    assert [d.update for d in decisions if d.stop] == stops


def test_a_decision_is_left_in_the_run_folder(tmp_path: Path) -> None:
    write_run(tmp_path / "run", updates=16, reward=collapse, kl_growth=growth)
    decision = check(tmp_path / "run", Thresholds(action="stop", stop_after=2), drain=lambda pool: None)
    assert decision is not None and decision.stop and decision.mode == "three signs"
    written = json.loads((tmp_path / "run" / "guard.json").read_text())
    assert written["stop"] is True and written["update"] == 15 and written["level"] == "collapse"
    assert [p.name for p in (tmp_path / "run").iterdir() if p.suffix == ".tmp"] == []


def test_no_finished_update_no_decision(tmp_path: Path) -> None:
    assert check(tmp_path, Thresholds(), drain=lambda pool: None) is None
    assert not (tmp_path / "guard.json").exists()


def faulty_pool_run(run_dir: Path, updates: int) -> None:
    """Pool nvfp4 goes astray at update 8."""
    write_run(run_dir, updates=updates)
    path = MetricsLog(run_dir).path
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "train" and line["update"] >= 8:
            line["metrics"]["mixprec/pool/nvfp4/kl_num"] *= 30
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_faulty_pool_is_drained_once(tmp_path: Path) -> None:
    faulty_pool_run(tmp_path, updates=12)
    drained: list[str] = []
    for _ in range(2):
        decision = check(tmp_path, Thresholds(action="quarantine"), drain=drained.append)
    assert drained == ["nvfp4"]
    assert decision is not None and decision.quarantined == ("nvfp4",) and not decision.stop


def test_a_warning_run_drains_nothing(tmp_path: Path) -> None:
    faulty_pool_run(tmp_path, updates=12)
    decision = check(tmp_path, Thresholds(action="warn"), drain=pytest.fail)
    assert decision is not None and decision.level == "warning" and decision.quarantined == ()


def test_a_failed_drain_is_tried_again(tmp_path: Path) -> None:
    faulty_pool_run(tmp_path, updates=12)

    def unreachable(pool: str) -> None:
        raise ConnectionError(pool)

    with pytest.raises(ConnectionError):
        check(tmp_path, Thresholds(action="quarantine"), drain=unreachable)
    drained: list[str] = []
    check(tmp_path, Thresholds(action="quarantine"), drain=drained.append)
    assert drained == ["nvfp4"]


def test_a_quarantined_pool_stays_so_when_it_is_silent() -> None:
    trace = run(30, pool_kl={"a": flat(1e-3), "b": ramp(1e-3, 1.0, 8, 9)})
    for signals in trace[15:]:
        del signals.pools["b"]
    assert decide(judge(Thresholds(), trace), Thresholds(action="quarantine")).quarantined == ("b",)


async def _drain_a_pool(token: str | None) -> tuple[bool, bool]:
    config = Router(admin_token_env="DRAIN_TEST_TOKEN")
    fleet = Fleet(
        name="two",
        model="m",
        context_length=64,
        pools={name: Pool(view=name, slots_per_engine=4) for name in ("bf16", "fp8")},
    )
    async with TestServer(build_app(config, fleet)) as server:
        url = str(server.make_url("")).rstrip("/")
        if token is not None:
            os.environ["DRAIN_TEST_TOKEN"] = token
        await asyncio.to_thread(drain_through(url, config), "fp8")
        pools = server.app[PROXY].fleet.pools
        return pools["bf16"].draining, pools["fp8"].draining


def test_drains_through_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAIN_TEST_TOKEN", "secret")
    assert asyncio.run(_drain_a_pool(None)) == (False, True)


def test_a_router_that_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAIN_TEST_TOKEN", "secret")
    with pytest.raises(EngineError, match=r"pool fp8: .*403"):
        asyncio.run(_drain_a_pool("another"))
