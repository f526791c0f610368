"""The only importer of `miles.*`: what differs between Miles 0.0.2 and 0.1 ends here."""

from __future__ import annotations

from dataclasses import dataclass

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
