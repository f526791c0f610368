"""Small models as named BF16 tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "bfloat16",
    "hidden_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "num_experts": 4,
    "moe_intermediate_size": 64,
}


def moe(
    seed: int = 0, *, stacked: bool = False, layers: int = 1, hidden: int = 128, experts: int = 4
) -> dict[str, Tensor]:
    """A mixture-of-experts model with full and linear attention, a shared expert, vision and MTP parts."""
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.05).bfloat16()

    tensors = {
        "model.embed_tokens.weight": new(256, hidden),
        "model.norm.weight": new(hidden),
        "lm_head.weight": new(256, hidden),
        "model.visual.blocks.0.mlp.linear_fc1.weight": new(64, hidden),
        "mtp.layers.0.mlp.gate_proj.weight": new(64, hidden),
    }
    for i in range(layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": new(hidden),
            f"{layer}.self_attn.q_proj.weight": new(160, hidden),
            f"{layer}.self_attn.q_norm.weight": new(32),
            f"{layer}.linear_attn.in_proj_qkv.weight": new(192, hidden),
            f"{layer}.linear_attn.in_proj_a.weight": new(8, hidden),
            f"{layer}.linear_attn.conv1d.weight": new(192, 1, 4),
            f"{layer}.linear_attn.A_log": new(8).float(),
            f"{layer}.mlp.gate.weight": new(experts, hidden),
            f"{layer}.mlp.shared_expert_gate.weight": new(1, hidden),
            f"{layer}.mlp.shared_expert.gate_proj.weight": new(64, hidden),
            f"{layer}.mlp.shared_expert.up_proj.weight": new(64, hidden),
            f"{layer}.mlp.shared_expert.down_proj.weight": new(hidden, 64),
        }
        gate_up, down = new(experts, 128, hidden), new(experts, hidden, 64)
        if stacked:
            tensors |= {f"{layer}.mlp.experts.gate_up_proj": gate_up, f"{layer}.mlp.experts.down_proj": down}
            continue
        for e in range(experts):
            tensors |= {
                f"{layer}.mlp.experts.{e}.gate_proj.weight": gate_up[e, :64].clone(),
                f"{layer}.mlp.experts.{e}.up_proj.weight": gate_up[e, 64:].clone(),
                f"{layer}.mlp.experts.{e}.down_proj.weight": down[e].clone(),
            }
    return tensors


def trained(tensors: dict[str, Tensor], seed: int, share: float = 0.02) -> dict[str, Tensor]:
    """The model after an update that changed some elements of every tensor."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + (torch.rand(tensor.shape, generator=generator) < share).to(tensor.dtype) * 0.01
        for name, tensor in tensors.items()
    }


def directory(path: Path, tensors: dict[str, Tensor]) -> Path:
    """A Hugging Face checkpoint directory of `tensors`."""
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    return path
