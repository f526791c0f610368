"""`python -m miles_mixprec.router --config run.yaml`: run the router of a resolved configuration."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import uvloop

from miles_mixprec.config import from_file
from miles_mixprec.errors import MixprecError
from miles_mixprec.router.server import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m miles_mixprec.router", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="the whole configuration tree, as YAML")
    parser.add_argument("--ready-file", type=Path, help="gets the bound address as JSON")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    arguments = parser.parse_args()
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        uvloop.run(serve(from_file(arguments.config), ready_file=arguments.ready_file))
    except (MixprecError, OSError) as error:  # OSError: an address or file that cannot be had
        raise SystemExit(f"router: {error}") from None


if __name__ == "__main__":
    main()
