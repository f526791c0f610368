"""Configurations of test runs, and waiting for what other processes publish."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import yaml

from miles_mixprec.config import Config, from_mapping
from miles_mixprec.weights.store import Store


def run_config(root: Path, **weights: object) -> Config:
    pools = {
        view: {"view": view, "slots_per_engine": 4, "execution": "native" if view == "bf16" else "dequantized"}
        for view in ("bf16", "fp8", "nvfp4")
    }
    tree = {
        "fleet": {"name": "test", "model": str(root / "model"), "context_length": 256, "pools": pools},
        "algo": {"name": "test"},
        "weights": {"store": str(root / "store"), "poll_s": 0.05, **weights},
        "run_dir": str(root / "run"),
        "run_id": "run",
        "updates": 1,
        "prompts_per_update": 1,
    }
    (root / "run.yaml").write_text(yaml.safe_dump({"mixprec": tree}))
    return from_mapping(tree)


def until(condition: Callable[[], bool], what: Callable[[], object] = str, seconds: float = 60) -> None:
    """Wait for a condition that another process brings about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting after {seconds} s: {what()}"
        time.sleep(0.05)


def wait_for(opened: Store, version: int, views: tuple[str, ...], attempt: int = 1, seconds: float = 60) -> None:
    """Wait until every view is published up to `version` of `attempt`."""
    pointers = lambda: [opened.latest(view) for view in views]  # noqa: E731
    until(lambda: all(p is not None and p.order >= (attempt, version) for p in pointers()), pointers, seconds)
