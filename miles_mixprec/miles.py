"""The only importer of `miles.*`: what differs between Miles 0.0.2 and 0.1 ends here."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_mixprec.config import from_args
from miles_mixprec.errors import CapabilityError, ContractError

# --- loss ----------------------------------------------------------------------------------------------------------

_TRAINER_VERSION = 0


def parallel_state() -> Any:
    """Miles' process groups: `tp`, `cp`, `pp` and others, each with this rank's `rank`, the `size` and the `group`."""
    from miles.backends.training_utils.parallel import get_parallel_state

    return get_parallel_state()


def trainer_version() -> int:
    """Weight version that the trainer holds: 0 for the model the run starts from, N + 1 after update N."""
    return _TRAINER_VERSION


def set_trainer_version(version: int) -> None:
    global _TRAINER_VERSION
    _TRAINER_VERSION = version


# --- weights -------------------------------------------------------------------------------------------------------


def weight_part() -> tuple[bool, int, int]:
    """(whether this rank writes gathered weights, its pipeline stage, number of stages)."""
    state = parallel_state()
    writes = state.intra_dp_cp.rank == 0 and state.tp.rank == 0
    return writes, state.pp.rank, state.pp.size


@torch.no_grad()
def gather_hf(
    args: Namespace,
    model: Sequence[torch.nn.Module],
    model_name: str,
    sink: Callable[[list[tuple[str, torch.Tensor]]], None],
) -> None:
    """Feed the model to `sink` in buckets of unquantised Hugging Face tensors, with Miles' own gather and name
    mapping.

    Collective: every rank calls it; `sink` is called on the ranks that `weight_part` says write. Tensors are gathered
    over tensor and expert parallelism, buckets bounded by `--update-weight-buffer-size`.
    """
    from miles.backends.megatron_utils.update_weight.update_weight_from_distributed.mixin import (
        DistBucketedWeightUpdateMixin,
    )

    gather = DistBucketedWeightUpdateMixin()
    gather.args, gather.model, gather.model_name, gather.quantization_config = args, model, model_name, None
    gather._is_source = weight_part()[0]
    gather._gather_and_update_non_expert_weights(lambda named, _: sink(named))
    weight_barrier()
    gather._gather_and_update_expert_weights(lambda named, _: sink(named))
    weight_barrier()


def weight_barrier() -> None:
    from miles.utils.distributed_utils import get_gloo_group

    dist.barrier(group=get_gloo_group())


def start_version(args: Namespace) -> int:
    """Updates that the model holds when the trainer starts: 0, or one more than the rollout a checkpoint was saved
    after.
    """
    if args.start_rollout_id is not None:
        return int(args.start_rollout_id)
    saved = args.ckpt_step
    if saved is None:
        saved = (Path(args.load) / "latest_checkpointed_iteration.txt").read_text()
    return int(saved) + 1


# --- rollout manager -----------------------------------------------------------------------------------------------


def convert_samples(args: Namespace, samples: list[Any]) -> dict[str, Any]:
    """Miles' `--custom-convert-samples-to-train-data-path`: the stock conversion, with every sample's record aboard.

    Raises ContractError for a sample without a record, which means that another generate function made it.
    """
    from miles_mixprec.rollout.carrier import FIELD, pack
    from miles_mixprec.rollout.generate import RECORD

    data = _stock_conversion(args, samples)
    if FIELD in data:
        raise CapabilityError(f"this Miles fills the training field {FIELD!r} itself; update miles_mixprec")
    for sample in samples:
        if RECORD not in vars(sample):
            raise ContractError(
                f"sample {sample.index} has no sampler record; set --custom-generate-function-path "
                "miles_mixprec.rollout.generate.generate and no other"
            )
    data[FIELD] = [pack(vars(sample)[RECORD]) for sample in samples]
    return data


def _stock_conversion(args: Namespace, samples: list[Any]) -> dict[str, Any]:
    from miles.utils.misc import load_function

    path = args.custom_reward_post_process_path
    post_process = load_function(path) if path is not None else None
    if features().generation == "0.1":
        from miles.ray.rollout.train_data_conversion import convert_samples_to_train_data

        metadata = {"dynamic_global_batch_size": len(samples)} if args.use_dynamic_global_batch_size else {}
        return dict(convert_samples_to_train_data(args, samples, metadata, None, post_process))
    from miles.ray.rollout import RolloutManager

    # A method of the manager, whose instance hooks cannot reach: run it on a bare one that has what it reads.
    manager_class = RolloutManager.__ray_metadata__.modified_class
    manager = object.__new__(manager_class)
    manager.args = args
    manager.custom_reward_post_process_func = post_process
    manager.custom_convert_samples_to_train_data_func = None
    if args.use_dynamic_global_batch_size:
        manager._dynamic_global_batch_size = len(samples)
    return dict(manager._convert_samples_to_train_data(samples))


def generate_rollout(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Miles 0.0.2's `--rollout-function-path`: fully asynchronous rollout, which 0.1 has itself (`--fully-async`).

    Groups are generated without pause in the manager's event loop, through weight updates and training alike; a call
    takes the next `rollout_batch_size` finished ones. Staleness is unbounded and recorded.
    """
    from miles.rollout import sglang_rollout
    from miles.rollout.base_types import RolloutFnTrainOutput
    from miles.utils.async_utils import run

    from miles_mixprec.rollout.fully_async import GroupStream

    if evaluation:
        return sglang_rollout.generate_rollout(args, rollout_id, data_source, evaluation=True)
    stream = GroupStream.of(
        args,
        fetch=lambda: data_source.get_samples(1)[0],
        generate=lambda group: sglang_rollout.generate_and_rm_group(
            args, group, sglang_rollout.GenerateState(args).sampling_params.copy()
        ),
    )
    return RolloutFnTrainOutput(samples=run(stream.take(args.rollout_batch_size)), metrics=stream.metrics())


async def agentic_generate(input: Any) -> Any:
    """Miles' own generate function for agents behind its session server."""
    from miles.rollout.generate_hub import agentic_tool_call

    return await agentic_tool_call.generate(input)


# --- trainer -------------------------------------------------------------------------------------------------------


def megatron_init(args: Namespace) -> None:
    """Miles' `--custom-megatron-init-path`, on every trainer rank before the model is built: installs both patches.

    1. `DataIterator.get_next` also delivers what the carrier holds. 2. The weight updater is our publisher.
    Raises ConfigError for flags that contradict the recipe, CapabilityError if Miles' code is not what this expects.
    """
    from miles_mixprec.loss.policy import check_recipe

    config = from_args(args)
    check_recipe(args, config.algo)
    _deliver_records()
    _publish_weights()
    _log_training()
    if "megatron_init" in config.chain:
        from miles.utils.misc import load_function

        load_function(config.chain["megatron_init"])(args)


def _deliver_records() -> None:
    from miles.backends.training_utils.data import DataIterator

    from miles_mixprec.rollout.carrier import FIELD, batch_entries

    _expect(DataIterator.get_next, ["self", "keys"])
    stock = DataIterator.get_next
    if getattr(stock, "delivers_records", False):
        return

    @functools.wraps(stock)
    def get_next(self: Any, keys: Sequence[str]) -> dict[str, Any]:
        batch = stock(self, [*keys, FIELD])
        blobs = batch.pop(FIELD)
        if blobs is not None and isinstance(blobs[0], bytes):
            batch.update(batch_entries(blobs))
        return batch

    get_next.delivers_records = True  # type: ignore[attr-defined]
    DataIterator.get_next = get_next


def _publish_weights() -> None:
    from miles.backends.megatron_utils import actor

    from miles_mixprec.weights.publisher import Publisher

    if not hasattr(actor, "UpdateWeightFromDistributed"):
        raise CapabilityError("this Miles chooses its weight updater elsewhere; update miles_mixprec")
    actor.UpdateWeightFromDistributed = Publisher


def _log_training() -> None:
    """Add the run log to Miles' tracking backends, on the ranks that log."""
    from miles_mixprec.rollout.log import TrainLog

    _tracking_registry()["mixprec"] = (TrainLog, "mixprec")


def _tracking_registry() -> dict[str, Any]:
    if features().generation == "0.1":
        from miles.utils.tracking_utils.tracking import BACKEND_REGISTRY
    else:
        from miles.utils.tracking_utils.base import BACKEND_REGISTRY
    return BACKEND_REGISTRY


def _expect(function: Callable[..., Any], names: list[str]) -> None:
    found = list(inspect.signature(inspect.unwrap(function)).parameters)
    if found != names:
        raise CapabilityError(
            f"{function.__module__}.{function.__qualname__} takes {found}, expected {names}; "
            "this Miles is newer than this miles_mixprec, update it"
        )


# --- what this Miles can do ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Features:
    """What the importable Miles offers."""

    generation: str  # "0.0.2" or "0.1"
    location: str
    offers: tuple[str, ...]  # of what this package brings or works with


@functools.lru_cache
def features() -> Features:
    """Probe the importable Miles without importing it. Raises CapabilityError if there is none."""
    spec = importlib.util.find_spec("miles")
    if spec is None or not spec.submodule_search_locations:
        raise CapabilityError("Miles is not importable; install miles-rl==0.0.2 or put a Miles checkout on PYTHONPATH")
    root = Path(next(iter(spec.submodule_search_locations)))

    def has(path: str) -> bool:
        return (root / path).exists()

    def mentions(path: str, text: str) -> bool:
        return has(path) and text in (root / path).read_text()

    delta = "backends/megatron_utils/update_weight/update_weight_from_distributed/delta.py"
    offers = {
        "fully_async": mentions("utils/arguments.py", "--fully-async"),
        "disk_delta": has(delta),
        "session_samples": has("rollout/session/samples"),  # the session server merges samples itself
        "topk": mentions("backends/megatron_utils/model.py", "rollout_topk_token_ids"),
        "support": mentions("backends/megatron_utils/model.py", "rollout_sampling_mask"),
        "views": mentions("utils/arguments.py", "--update-weight-views"),
    }
    generation = "0.1" if has("ray/rollout/rollout_manager.py") else "0.0.2"
    return Features(generation, str(root), tuple(name for name, there in offers.items() if there))
