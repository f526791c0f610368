"""The training loop for Miles 0.0.2, whose wheel ships none; Miles 0.1 brings `train_async.py`.

    python driver.py <Miles flags>

Generation never waits for training: while update N is computed and published, the samplers go on, and the engines switch
versions in the middle of episodes.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace

import ray
from miles.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from miles.utils.arguments import parse_args
from miles.utils.logging_utils import configure_logger
from miles.utils.misc import should_run_periodic_action
from miles.utils.tracking_utils import finish_tracking, init_tracking


async def train(args: Namespace) -> None:
    configure_logger()
    ray.init(num_gpus=4, num_cpus=16, include_dashboard=False, object_store_memory=500_000_000, log_to_driver=True)
    placement = create_placement_groups(args)
    init_tracking(args)
    rollouts, per_epoch = create_rollout_manager(args, placement["rollout"])
    actor, _ = await create_training_models(args, placement, rollouts)
    await actor.update_weights()

    async def evaluate(rollout_id: int) -> None:
        if should_run_periodic_action(rollout_id, args.eval_interval, per_epoch, args.num_rollout):
            await rollouts.eval.remote(rollout_id)

    upcoming = rollouts.generate.remote(args.start_rollout_id)
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        batch = await upcoming
        if rollout_id + 1 < args.num_rollout:
            upcoming = rollouts.generate.remote(rollout_id + 1)
        await actor.train(rollout_id, batch)
        if should_run_periodic_action(rollout_id, args.save_interval, per_epoch, args.num_rollout):
            await actor.save_model(rollout_id, force_sync=rollout_id == args.num_rollout - 1)
            await rollouts.save.remote(rollout_id)
        await actor.update_weights()
        await evaluate(rollout_id)

    ray.get(rollouts.dispose.remote())
    finish_tracking()


if __name__ == "__main__":
    asyncio.run(train(parse_args()))
