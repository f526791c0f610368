"""`miles-mixprec`: plan, flags, doctor, serve, bench, report.

Commands that read a run's or a fleet's configuration take Hydra overrides as trailing arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import shlex
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from miles_mixprec import config as configuration
from miles_mixprec.errors import ConfigError, EngineError, MixprecError

Arguments = argparse.Namespace
console = Console(width=None if sys.stdout.isatty() else 140)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 1 checks failed, 2 refused with one line on stderr)."""
    arguments = _parser().parse_args(argv)
    arguments.words = list(sys.argv[1:] if argv is None else argv)
    try:
        return int(arguments.run(arguments) or 0)
    except (MixprecError, OSError) as error:  # an OSError names the file that it is about
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        return 2


def flags(arguments: Arguments) -> None:
    from miles_mixprec.flags import miles_flags

    print(shlex.join(miles_flags(_config(arguments))))


def serve(arguments: Arguments) -> None:
    from miles_mixprec.serve import serve as supervise

    supervise(_config(arguments))


def report(arguments: Arguments) -> None:
    from miles_mixprec.guard.report import write_all

    for path in write_all(arguments.run_dirs):
        console.print(f"wrote {path}")


def plan(arguments: Arguments) -> None:
    from miles_mixprec.planner import cost as costs
    from miles_mixprec.planner import mix as mixes
    from miles_mixprec.planner import plan as planning

    fleet = _fleet(arguments)
    machine = costs.MachinePrices(arguments.core_price, arguments.gib_price)
    offers = planning.offers_of(
        fleet,
        context=arguments.context,
        measured=planning.read_measurements(arguments.bench, latency_s=arguments.latency),
        kl=_named(arguments.kl, float),
        machine=machine,
    )
    demand = mixes.Demand(
        arguments.sessions or 0, arguments.updates_per_hour, arguments.turns_per_update, arguments.context
    )
    limits = mixes.Limits(_named(arguments.available, int), arguments.max_kl)
    mix = mixes.solve(offers, demand, limits)
    planned = planning.planned_fleet(fleet, mix, arguments.context, offers)
    verdict = planning.verdict(offers, demand, limits, mix)
    reasons = planning.explain(offers, demand, limits, mix) if arguments.explain else []
    stages = planning.grow(offers, demand, _growth(arguments.growth), limits)
    others = [configuration.load_fleet([f"fleet={name}", *_model(arguments)]) for name in arguments.compare]
    sessions = arguments.sessions or None
    rows = [costs.fleet_cost(each, sessions, machine) for each in (planned, *others)]
    if arguments.write:
        command = shlex.join(["miles-mixprec", *arguments.words])
        arguments.write.write_text(planning.fleet_yaml(planned, f"Written by `{command}`."))
    if arguments.json:
        found = {"mix": mix, "verdict": verdict, "reasons": reasons, "stages": stages, "costs": rows}
        print(json.dumps(found, default=dataclasses.asdict, indent=2))
        return
    _print_costs(rows, arguments.updates_per_hour)
    console.print(verdict)
    for line in reasons:
        console.print(f"- {line}", highlight=False)
    for stage in stages:
        change = ", ".join(f"{name} {n:+d}" for name, n in stage.change.items()) or "no change"
        console.print(f"from update {stage.update} ({stage.context:,} tokens): ${stage.mix.hourly:.2f}/h; {change}")


def bench(arguments: Arguments) -> None:
    from miles_mixprec import bench as benchmark

    fleet = _fleet(arguments)
    pool = fleet.pools.get(arguments.pool)
    if pool is None:
        raise ConfigError(f"pool {arguments.pool}: not in fleet {fleet.name}; it has {', '.join(fleet.pools)}")
    url = arguments.url or next(iter(pool.urls), None)
    if url is None:
        raise ConfigError(
            f"pool {arguments.pool}: no engine to measure; give --url or fleet.pools.{arguments.pool}.urls"
        )
    if arguments.episodes:
        episodes = benchmark.read_episodes(arguments.episodes)
    else:
        episodes = benchmark.synthetic_episodes(max_context=fleet.context_length)
    ramp = benchmark.Ramp(arguments.levels, arguments.warm, arguments.window, arguments.latency)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("warming up", total=None)

        def show(point: benchmark.Point) -> None:
            found = f"{point.sessions} sessions: {point.turns_per_hour:,.0f} turns/h, p90 {point.p90_s:.2f} s"
            progress.update(task, description=found)

        result = asyncio.run(
            benchmark.bench(
                url,
                arguments.pool,
                episodes,
                ramp,
                max_context=fleet.context_length,
                token_range=tuple(arguments.token_range),
                on_point=show,
            )
        )
    headings = ("sessions", "turns/h", "tok/s", "p50 s", "p90 s", "context", "errors")
    table = Table(*headings, title=f"{result.pool} at {url}")
    for p in result.points:
        rates = f"{p.turns_per_hour:,.0f}", f"{p.tokens_per_s:,.0f}", f"{p.p50_s:.2f}", f"{p.p90_s:.2f}"
        table.add_row(f"{p.sessions}", *rates, f"{p.context:,}", f"{p.errors:.1%}")
    console.print(table, f"stopped: {result.stopped}")
    result.write(arguments.output)


def doctor(arguments: Arguments) -> int:
    from miles_mixprec.doctor import diagnose

    config = _config(arguments)
    diagnosis = asyncio.run(
        diagnose(
            config,
            _engines(config, arguments),
            router_url=arguments.router,
            reference=arguments.reference,
            max_kl=arguments.max_kl,
            token_range=tuple(arguments.token_range),
        )
    )
    if arguments.json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
        return int(diagnosis.failed)
    table = Table("", "subject", "check", "found")
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[bold red]failed[/]"}
    for check in diagnosis.checks:
        table.add_row(marks[check.status], check.subject, check.name, escape(check.detail))
    console.print(table)
    if diagnosis.parity:
        parity = Table("engine", "GPU", "attention", "MoE", "KV", "view", "KL", "p99 |d|", title="mismatch")
        for row in diagnosis.parity:
            view = f"{row.view} (decoded)" if row.execution == "dequantized" else row.view
            cells = row.engine, row.accelerator, row.attention, row.moe, row.kv_cache, view
            parity.add_row(*cells, f"{row.kl:.2e}", f"{row.p99_abs:.1e}")
        console.print(parity)
    return int(diagnosis.failed)


def _print_costs(rows: Sequence[Any], updates_per_hour: float) -> None:
    """One fleet per row, the planned one first; the last column compares with it."""
    costs = ("billed $/h", "busy", "idle", "$/slot-h", "$/update", "against plan")
    table = Table("fleet", "engines", "GPUs", "slots", *costs)
    for row in rows:
        per_update = f"{row.billed / updates_per_hour:.2f}" if updates_per_hour else "-"
        cells = [row.name, f"{row.engines}", f"{row.accelerators}", f"{row.slots:,}", f"{row.billed:.2f}"]
        cells += [f"{row.busy:.2f}", f"{row.idle:.2f}", f"{row.billed / row.slots:.3f}", per_update]
        table.add_row(*cells, f"{row.billed / rows[0].billed - 1:+.1%}")
    console.print(table)


def _config(arguments: Arguments) -> configuration.Config:
    return configuration.load(arguments.config, arguments.overrides, conf_dir=arguments.config_dir)


def _fleet(arguments: Arguments) -> configuration.Fleet:
    return configuration.load_fleet(arguments.overrides, name=arguments.config, conf_dir=arguments.config_dir)


def _model(arguments: Arguments) -> list[str]:
    return [override for override in arguments.overrides if override.startswith("fleet.model=")]


def _engines(config: configuration.Config, arguments: Arguments) -> dict[str, str]:
    """Engines named on the command line, else those that the router knows, else the URLs of the fleet."""
    if arguments.engine:
        return _named(arguments.engine, str)
    if arguments.router:
        try:
            with urllib.request.urlopen(f"{arguments.router}/workers", timeout=10) as reply:
                return {worker["engine"]: worker["url"] for worker in json.load(reply)["workers"]}
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise EngineError(f"router {arguments.router}: {error}; start it or correct --router") from error
    return {f"{name}/{i}": url for name, pool in config.fleet.pools.items() for i, url in enumerate(pool.urls)}


def _named(words: Sequence[str], kind: Callable[[str], Any]) -> dict[str, Any]:
    """NAME=VALUE words, with values of `kind`. Raises ConfigError, naming the word."""
    found = {}
    for word in words:
        name, given, value = word.partition("=")
        if not given:
            raise ConfigError(f"{word}: not NAME=VALUE")
        try:
            found[name] = kind(value)
        except ValueError as error:
            raise ConfigError(f"{word}: {error}") from error
    return found


def _growth(words: Sequence[str]) -> list[tuple[int, int]]:
    try:
        return [(int(update), int(context)) for update, context in (word.split(":") for word in words)]
    except ValueError as error:
        raise ConfigError(f"--growth {' '.join(words)}: give UPDATE:TOKENS pairs, e.g. 60:64000 140:94000") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miles-mixprec", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        name: str, run: Callable[[Arguments], int | None], summary: str, *examples: str
    ) -> argparse.ArgumentParser:
        epilog = "examples:\n" + "\n".join(f"  miles-mixprec {name} {example}" for example in examples)
        layout = argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(name, help=summary, description=summary, epilog=epilog, formatter_class=layout)
        sub.set_defaults(run=run)
        return sub

    def configured(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("--config", default="config", metavar="NAME", help="configuration to compose")
        sub.add_argument("--config-dir", type=Path, default=configuration.CONF_DIR, metavar="DIR", help="where it is")
        sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, e.g. fleet=article_mixed")

    run_keys = (
        "run_dir=runs/a run_id=a updates=30 prompts_per_update=4 fleet.model=models/tiny weights.store=runs/a/store"
    )
    configured(command("flags", flags, "print the Miles flags of a run", run_keys, f"algo=sc_mis {run_keys}"))
    supervise = "launch and supervise router, engines, encoders and sidecars of a run"
    configured(command("serve", serve, supervise, run_keys, f"fleet=planned {run_keys}"))

    sub = command("report", report, "write a run's HTML report, or compare several", "runs/a", "runs/a runs/b")
    sub.add_argument("run_dirs", nargs="+", metavar="RUN_DIR")

    sub = command(
        "plan",
        plan,
        "choose the cheapest engine counts from the pools of a fleet",
        "--sessions 1344 --explain --compare article_homogeneous -- fleet=article_mixed",
        "--sessions 1344 --available h200=24 b300=24 --write planned.yaml -- fleet=article_mixed",
        "--sessions 1344 --growth 60:64000 140:94000 --bench h200.json b300.json -- fleet=article_mixed",
    )
    sub.add_argument("--sessions", type=int, metavar="N", help="concurrent sessions to carry")
    sub.add_argument("--updates-per-hour", type=float, default=0.0, metavar="RATE")
    sub.add_argument("--turns-per-update", type=float, default=0.0, metavar="N", help="samples times mean turns")
    sub.add_argument(
        "--context", type=int, default=64000, metavar="TOKENS", help="what a session holds (default 64000)"
    )
    sub.add_argument("--latency", type=float, default=10.0, metavar="S", help="p90 bound of a turn (default 10)")
    sub.add_argument("--bench", type=Path, nargs="+", default=[], metavar="FILE", help="results of `bench`")
    sub.add_argument("--available", nargs="+", default=[], metavar="GPU=N", help="accelerators that can be had")
    sub.add_argument("--kl", nargs="+", default=[], metavar="POOL=X", help="measured sampler-trainer KL per token")
    sub.add_argument("--max-kl", type=float, metavar="X", help="bound on the mean KL over sessions")
    sub.add_argument("--core-price", type=float, default=0.0, metavar="$", help="per CPU core and hour")
    sub.add_argument("--gib-price", type=float, default=0.0, metavar="$", help="per GiB of main memory and hour")
    sub.add_argument("--growth", nargs="+", default=[], metavar="UPDATE:TOKENS", help="plan again as contexts grow")
    sub.add_argument("--compare", nargs="+", default=[], metavar="FLEET", help="further fleets for the cost table")
    sub.add_argument("--explain", action="store_true", help="say why each pool got its engines")
    sub.add_argument("--write", type=Path, metavar="FILE", help="write the planned fleet as YAML")
    sub.add_argument("--json", action="store_true")
    configured(sub)

    sub = command(
        "bench",
        bench,
        "measure slots and turns per hour of one engine at a turn-latency bound",
        "--pool h200_fp8 --url http://10.0.0.7:30000 --output h200.json -- fleet=article_mixed",
        "--pool fp8 --url http://127.0.0.1:30000 --levels 2 4 8 --warm 5 --window 10 -- fleet.model=models/tiny",
    )
    sub.add_argument("--pool", required=True)
    sub.add_argument("--url", help="engine to measure (default: the pool's first URL)")
    sub.add_argument("--episodes", type=Path, metavar="FILE", help="recorded episodes (default: synthetic ones)")
    sub.add_argument("--levels", type=int, nargs="+", default=[8, 16, 24, 32, 48, 64, 96, 128, 192, 256])
    sub.add_argument("--warm", type=float, default=120.0, metavar="S")
    sub.add_argument("--window", type=float, default=180.0, metavar="S")
    sub.add_argument("--latency", type=float, default=10.0, metavar="S", help="p90 bound of a turn (default 10)")
    sub.add_argument("--token-range", type=int, nargs=2, default=[1000, 20000], metavar=("LOW", "HIGH"))
    sub.add_argument("--output", type=Path, default=Path("bench.json"), metavar="FILE")
    configured(sub)

    sub = command(
        "doctor",
        doctor,
        "check Miles, engines, store, clocks and prices before a run",
        f"--router http://127.0.0.1:8000 --reference bf16 -- {run_keys}",
        f"--engine bf16/0=http://10.0.0.7:30000 fp8/0=http://10.0.0.8:30000 --json -- {run_keys}",
    )
    sub.add_argument("--router", metavar="URL", help="check it too, and the engines that it knows")
    sub.add_argument("--engine", nargs="+", default=[], metavar="POOL/INDEX=URL", help="engines to check")
    sub.add_argument("--reference", metavar="POOL", help="pool to compare log-probs with (default: the first)")
    sub.add_argument(
        "--max-kl", type=float, default=0.05, metavar="X", help="largest KL to the reference (default 0.05)"
    )
    sub.add_argument("--token-range", type=int, nargs=2, default=[1000, 20000], metavar=("LOW", "HIGH"))
    sub.add_argument("--json", action="store_true")
    configured(sub)
    return parser


if __name__ == "__main__":
    sys.exit(main())
