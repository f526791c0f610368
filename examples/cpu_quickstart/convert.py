"""The small model as a Megatron checkpoint, with the flags of the run, of which Megatron takes those it knows:

    python convert.py --hf-checkpoint MODEL --save DIR <flags>

Miles' converter from Megatron to Hugging Face names is run on the positions of each parameter's elements, which says
where every element of the Hugging Face tensors goes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.training.arguments import parse_args, validate_args
from megatron.training.checkpointing import save_checkpoint
from megatron.training.training import get_model
from miles.backends.megatron_utils.arguments import set_default_megatron_args
from miles.backends.megatron_utils.initialize import init
from miles.backends.megatron_utils.megatron_to_hf.qwen3moe import convert_qwen3moe_to_hf
from miles.backends.megatron_utils.model_provider import get_model_provider_func
from safetensors.torch import load_file


def main() -> None:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.setdefault("MASTER_PORT", "29677")
    dist.init_process_group("gloo", rank=0, world_size=1)
    args = set_default_megatron_args(parse_args(_conversion_args, ignore_unknown_args=True))
    args.global_batch_size, args.micro_batch_size, args.save_interval = 1, 1, 1
    args.bf16 = False  # the checkpoint holds BF16 values in FP32, whatever the run computes in
    validate_args(args)
    init(args)
    model = get_model(get_model_provider_func(args), ModelType.encoder_or_decoder, wrap_with_ddp=False)
    load_hugging_face(args, model[0], Path(args.hf_checkpoint))
    save_checkpoint(0, model, None, None, 0)
    dist.destroy_process_group()


@torch.no_grad()
def load_hugging_face(args: argparse.Namespace, model: torch.nn.Module, directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name, parameter in model.named_parameters():
        positions = torch.arange(parameter.numel()).view_as(parameter)
        target = parameter.view(-1)
        name = name.removeprefix("module.")
        for hugging_face_name, places in convert_qwen3moe_to_hf(args, f"module.module.{name}", positions):
            target[places.reshape(-1)] = tensors.pop(hugging_face_name).reshape(-1).to(parameter.dtype)
    assert not tensors, f"tensors without a place in the Megatron model: {sorted(tensors)}"


def _conversion_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--hf-checkpoint", required=True)
    parser.add_argument("--megatron-to-hf-mode", default="raw")
    return parser


if __name__ == "__main__":
    main()
