"""Starts a local Ray with logical GPUs and trains: `python driver.py <Miles flags>`.

Miles 0.1 brings its own loop, `train_async.py`, which runs as it is. The wheel of 0.0.2 ships none; the one below is
its equivalent.

Generation never waits for training: while update N is computed and published, the samplers go on, and the engines
switch versions in the middle of episodes.
"""

from __future__ import annotations

import asyncio
import json
import runpy
from argparse import Namespace
from pathlib import Path

import ray
from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from miles.utils.arguments import parse_args
from miles.utils.misc import should_run_periodic_action

from miles_mixprec.guard.watch import DECISION
from miles_mixprec.miles import features


async def train(args: Namespace) -> None:
    from miles.utils.logging_utils import configure_logger
    from miles.utils.tracking_utils import finish_tracking, init_tracking

    configure_logger()
    placement = create_placement_groups(args)
    init_tracking(args)
    rollouts, per_epoch = create_rollout_manager(args, placement["rollout"])
    actor, _ = await create_training_models(args, placement, rollouts)
    await actor.update_weights()

    async def evaluate(rollout_id: int) -> None:
        if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch, args.num_rollout):
            await rollouts.eval.remote(rollout_id)

    if args.eval_interval is not None and args.start_rollout_id == 0:
        await rollouts.eval.remote(-1)
    upcoming = rollouts.generate.remote(args.start_rollout_id)
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        batch = await upcoming
        if rollout_id + 1 < args.num_rollout:
            upcoming = rollouts.generate.remote(rollout_id + 1)
        await actor.train(rollout_id, batch)
        if should_run_periodic_action(rollout_id, args.save_interval, per_epoch, args.num_rollout) or _guard_asks(
            args
        ):
            await actor.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)
            await rollouts.save.remote(rollout_id)
        await actor.update_weights()
        await evaluate(rollout_id)

    ray.get(rollouts.dispose.remote())
    finish_tracking()


def _guard_asks(args: Namespace) -> bool:
    """Whether the guard wants the weights saved while they are still good."""
    path = Path(args.mixprec["run_dir"]) / DECISION
    return path.exists() and bool(json.loads(path.read_bytes())["save"])


if __name__ == "__main__":
    ray.init(num_gpus=4, num_cpus=16, include_dashboard=False, object_store_memory=500_000_000)
    if features().generation == "0.1":
        runpy.run_path(str(Path(features().location).parent / "train_async.py"), run_name="__main__")
    else:
        asyncio.run(train(parse_args()))
