"""`miles-mixprec`: plan, flags, doctor, serve, bench, report.

Every command that reads a run's configuration takes Hydra overrides as trailing arguments.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from miles_mixprec import config as configuration
from miles_mixprec.errors import MixprecError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0 done, 1 checks failed, 2 refused with one line on stderr)."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except MixprecError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {error}", highlight=False, markup=True)
        return 2


def flags(arguments: argparse.Namespace) -> None:
    from miles_mixprec.flags import miles_flags

    print(shlex.join(miles_flags(_config(arguments))))


def serve(arguments: argparse.Namespace) -> None:
    from miles_mixprec.serve import serve

    serve(_config(arguments))


def _config(arguments: argparse.Namespace) -> configuration.Config:
    return configuration.load(arguments.config, arguments.overrides, conf_dir=arguments.config_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miles-mixprec", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, summary: str, *examples: str) -> argparse.ArgumentParser:
        epilog = "examples:\n" + "\n".join(f"  miles-mixprec {name} {example}" for example in examples)
        sub = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run)
        sub.add_argument("--config", default="config", metavar="NAME", help="configuration to compose (default: config)")
        sub.add_argument("--config-dir", type=Path, default=configuration.CONF_DIR, metavar="DIR")
        sub.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="Hydra overrides, e.g. fleet=article_mixed")
        return sub

    run_keys = "run_dir=runs/a run_id=a updates=30 prompts_per_update=4 fleet.model=models/tiny weights.store=runs/a/store"
    command("flags", flags, "print the Miles flags of a run", run_keys, f"algo=sc_mis {run_keys}")
    command("serve", serve, "launch and supervise router, engines, encoders and sidecars", run_keys)
    return parser


if __name__ == "__main__":
    sys.exit(main())
