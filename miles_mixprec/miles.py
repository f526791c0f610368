"""The only importer of `miles.*`: what differs between Miles 0.0.2 and 0.1 ends here."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

# --- loss ----------------------------------------------------------------------------------------------------------

_TRAINER_VERSION = 0


@dataclass(frozen=True)
class Group:
    """This rank's place in one process group; `process_group` is None where there is nothing to communicate."""

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None


def tensor_parallel() -> Group:
    """The group over which the vocabulary is sharded."""
    return _group("tp")


def context_parallel() -> Group:
    """The group over which sequences are sharded."""
    return _group("cp")


def _group(name: str) -> Group:
    from miles.backends.training_utils.parallel import get_parallel_state

    info = getattr(get_parallel_state(), name)
    return Group(info.rank, info.size, info.group if info.size > 1 else None)


def trainer_version() -> int:
    """Weight version that the trainer holds: 0 for the model the run starts from, N + 1 after update N."""
    return _TRAINER_VERSION


def set_trainer_version(version: int) -> None:
    global _TRAINER_VERSION
    _TRAINER_VERSION = version


# --- weights -------------------------------------------------------------------------------------------------------


def weight_part() -> tuple[bool, int, int]:
    """(whether this rank writes gathered weights, its pipeline stage, number of stages)."""
    from miles.backends.training_utils.parallel import get_parallel_state

    state = get_parallel_state()
    writes = state.intra_dp_cp.rank == 0 and state.tp.rank == 0
    return writes, state.pp.rank, state.pp.size


@torch.no_grad()
def gather_hf(
    args: Namespace,
    model: Sequence[torch.nn.Module],
    model_name: str,
    sink: Callable[[list[tuple[str, torch.Tensor]]], None],
) -> None:
    """Feed the model to `sink` in buckets of unquantised Hugging Face tensors, with Miles' own gather and name mapping.

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
    """Updates that the model holds when the trainer starts: 0, or one more than the rollout a checkpoint was saved after."""
    if args.start_rollout_id is not None:
        return int(args.start_rollout_id)
    saved = args.ckpt_step
    if saved is None:
        saved = (Path(args.load) / "latest_checkpointed_iteration.txt").read_text()
    return int(saved) + 1
