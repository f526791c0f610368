"""Writes the resolved configuration of the run and deploys its router and engines on Modal.

python modal_app.py --write run.yaml                 # look at it first
python modal_app.py run_id=mine fleet=article_mixed  # deploy
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from miles_mixprec.config import load, to_file

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="only write the configuration")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    config = load("qwen3_6_coding", arguments.overrides, conf_dir=HERE / "conf")
    path = to_file(config, arguments.write or HERE / "run.yaml")
    if arguments.write is None:
        command = [sys.executable, "-m", "modal", "deploy", "-m", "miles_mixprec.providers.modal_app"]
        sys.exit(subprocess.run(command, env=os.environ | {"MIXPREC_RUN": str(path)}).returncode)


if __name__ == "__main__":
    main()
