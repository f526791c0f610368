"""Trainer ranks with Miles' own gather: `python miles_ranks.py RANK RENDEZVOUS PHASES`, ranks 0 and 1.

A made-up Qwen3-MoE in Megatron's names and layout, tensor-parallel over the ranks outside the experts and
expert-parallel inside, publishes through `Publisher` as Miles' actor drives it. Each phase (JSON: configuration,
number of ranks, steps) is a trainer of its own, so that Miles is imported once for all of them.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import yaml
from torch import nn

HIDDEN, EXPERTS, FFN = 64, 4, 32


def full(step: int) -> dict[str, tuple[torch.Tensor, int | None, int]]:
    """Megatron name -> (tensor, tensor-parallel dimension, stride)."""
    generator = torch.Generator().manual_seed(step)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    layer = "decoder.layers.0"
    tensors = {
        "embedding.word_embeddings.weight": (new(128, HIDDEN), 0, 1),
        "output_layer.weight": (new(128, HIDDEN), 0, 1),
        "decoder.final_layernorm.weight": (new(HIDDEN), None, 1),
        f"{layer}.self_attention.linear_qkv.weight": (new(2 * (2 + 2) * 16, HIDDEN), 0, 1),
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": (new(HIDDEN), None, 1),
        f"{layer}.self_attention.linear_proj.weight": (new(HIDDEN, 64), 1, 1),
        f"{layer}.pre_mlp_layernorm.weight": (new(HIDDEN), None, 1),
        f"{layer}.mlp.router.weight": (new(EXPERTS, HIDDEN), None, 1),
    }
    for e in range(EXPERTS):
        tensors[f"{layer}.mlp.experts.linear_fc1.weight{e}"] = (new(2 * FFN, HIDDEN), None, 1)
        tensors[f"{layer}.mlp.experts.linear_fc2.weight{e}"] = (new(HIDDEN, FFN), None, 1)
    return tensors


class Model:
    """What Miles asks of a Megatron model chunk."""

    config = SimpleNamespace(pipeline_model_parallel_size=1, num_layers=1)

    def __init__(self, step: int, rank: int, world: int) -> None:
        self.parameters: list[tuple[str, nn.Parameter]] = []
        per_rank = EXPERTS // world
        for name, (tensor, dim, stride) in full(step).items():
            if ".experts." in name:
                base, index = name.rsplit("weight", 1)
                if int(index) // per_rank != rank:
                    continue
                name = f"{base}weight{int(index) % per_rank}"
            parameter = nn.Parameter(tensor if dim is None else tensor.chunk(world, dim)[rank].clone())
            parameter.tensor_model_parallel, parameter.partition_dim = dim is not None, -1 if dim is None else dim
            parameter.partition_stride = stride
            self.parameters.append((f"module.module.{name}", parameter))

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.parameters

    def named_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return []


def main() -> None:
    rank, rendezvous, phases = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.cuda.current_device = lambda: "cpu"
    from megatron.core import parallel_state as megatron

    alone = [dist.new_group([r]) for r in range(2)][rank]
    groups = {1: alone, 2: dist.new_group()}
    megatron._PIPELINE_MODEL_PARALLEL_GROUP = alone
    for config, world, steps in phases:
        if rank < world:
            train(Path(config), rank, world, groups, steps)
        dist.barrier()


def train(config: Path, rank: int, world: int, groups: dict[int, dist.ProcessGroup], steps: list[int]) -> None:
    from miles.backends.training_utils import parallel
    from miles.utils import distributed_utils

    from miles_mixprec import miles
    from miles_mixprec.errors import MixprecError
    from miles_mixprec.weights.publisher import Publisher

    one = SimpleNamespace(rank=0, size=1, group=groups[1])
    all_ranks = SimpleNamespace(rank=rank, size=world, group=groups[world])
    parallel.set_parallel_state(
        SimpleNamespace(intra_dp=one, intra_dp_cp=one, cp=one, tp=all_ranks, pp=one, ep=all_ranks, etp=one)
    )
    distributed_utils.GLOO_GROUP = groups[world]
    args = Namespace(
        mixprec=yaml.safe_load(config.read_text())["mixprec"],
        hf_checkpoint=str(config.parent / "model"),
        start_rollout_id=steps[0],
        update_weights_interval=1,
        update_weight_buffer_size=20_000,
        vocab_size=120,
        q_lora_rank=None,
        num_experts=EXPERTS,
        swiglu=True,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        untie_embeddings_and_output_weights=True,
        megatron_to_hf_mode="raw",
    )
    chunks = [Model(steps[0], rank, world)]
    publisher = Publisher(args, chunks, dict, model_name="qwen3moe", quantization_config=None)
    publisher.connect_rollout_engines([], None, engine_gpu_counts=None, engine_gpu_offsets=None)
    assert publisher.is_rollout_engines_fresh()
    try:
        for step in steps:
            chunks[0] = Model(step, rank, world)
            publisher.update_weights()
            assert publisher.weight_version == miles.trainer_version() == step
            print(json.dumps(publisher.pop_metrics()), flush=True)
    except MixprecError as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main()
