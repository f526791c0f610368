"""A small Qwen3-MoE and its tokenizer, warm-started on noisy demonstrations so that rewards start between 0 and 1.

`python model.py DIR/model` builds all of it once; a finished directory is reused. `DIR/outliers` is the same model,
function for function, with the outlier channels that large models have and small ones lack.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from task import demonstration, draw_rows
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

RECIPE = {
    "seed": 0,
    "row_length": 4,
    "mistakes": 0.4,
    "steps": 500,
    "batch": 24,
    "learning_rate": 3e-3,
    "vocab_size": 512,
    "version": 1,
}
# Outlier channels of the variants: one in 16 is so many times larger than its neighbours, by turns. With them NVFP4
# costs some 1e-2 nats per token, as on large models; without, 5e-5.
OUTLIERS: dict[str, list[int]] = {"model": [], "outliers": [32, 64]}
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(directory: Path) -> Path:
    """Return `directory` with a BF16 Hugging Face model in it, building it if the recipe changed or it is missing.

    Its name says which variant: a key of `OUTLIERS`.
    """
    recipe = RECIPE | {"outliers": OUTLIERS[directory.name]}
    stamp = directory / "recipe.json"
    if stamp.exists() and json.loads(stamp.read_text()) == recipe:
        return directory
    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(directory, ignore_errors=True)
    if outliers := OUTLIERS[directory.name]:
        shutil.copytree(build(directory.with_name("model")), partial)
        add_outliers(partial, outliers)
    else:
        partial.mkdir(parents=True)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        warm_start(model, tokenizer)
        model.to(torch.bfloat16).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        split_experts(partial)
    (partial / "recipe.json").write_text(json.dumps(recipe))
    partial.rename(directory)
    return directory


def make_tokenizer() -> PreTrainedTokenizerFast:
    rng, rows = random.Random(1), draw_rows(1, RECIPE["row_length"])
    corpus = ["".join(text for text, _ in demonstration(next(rows), rng, 0.5)) for _ in range(200)]
    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=300, special_tokens=MARKERS[:3], initial_alphabet=alphabet)
    )
    core.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS[3:]])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        chat_template=TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3MoeForCausalLM:
    torch.manual_seed(RECIPE["seed"])
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=RECIPE["vocab_size"],
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=1024,
            rope_theta=10000.0,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def warm_start(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised next-token training on the demonstrations' replies; tool tokens carry no loss."""
    rng, rows = random.Random(RECIPE["seed"]), draw_rows(RECIPE["seed"], RECIPE["row_length"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RECIPE["learning_rate"], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RECIPE["learning_rate"], total_steps=RECIPE["steps"])
    model.train()
    started = time.time()
    for step in range(RECIPE["steps"]):
        ids, labels = _batch(
            tokenizer, [list(demonstration(next(rows), rng, RECIPE["mistakes"])) for _ in range(RECIPE["batch"])]
        )
        loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0 or step + 1 == RECIPE["steps"]:
            print(
                f"warm start {step + 1}/{RECIPE['steps']}: loss {loss.item():.3f}, {time.time() - started:.0f} s",
                flush=True,
            )
    model.eval()


def _batch(
    tokenizer: PreTrainedTokenizerFast, episodes: list[list[tuple[str, bool]]]
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = []
    for pieces in episodes:
        ids, labels = [], []
        for text, trained in pieces:
            piece = tokenizer.encode(text, add_special_tokens=False)
            ids += piece
            labels += piece if trained else [-100] * len(piece)
        rows.append((ids, labels))
    width = max(len(ids) for ids, _ in rows)
    pad = tokenizer.pad_token_id
    return (
        torch.tensor([ids + [pad] * (width - len(ids)) for ids, _ in rows]),
        torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows]),
    )


def split_experts(directory: Path) -> None:
    """Rewrite stacked expert tensors, if transformers saved any, under the per-expert names that SGLang updates by."""
    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        prefix, _, kind = name.partition(".mlp.experts.")
        if kind == "gate_up_proj":
            for expert, stacked in enumerate(tensor):
                gate, up = stacked.chunk(2, dim=0)
                tensors[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = gate.contiguous()
                tensors[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = up.contiguous()
        elif kind == "down_proj":
            for expert, down in enumerate(tensor):
                tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = down.contiguous()
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def add_outliers(directory: Path, sizes: Sequence[int]) -> None:
    """Make every 16th input channel of the experts larger, by powers of two, and the norm before them smaller.

    BF16 holds both exactly, so the function of the model does not change by a bit. NVFP4 has one scale per 16 channels
    and loses the small ones beside a large one, as it does with the outliers of large models.
    """
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for norm in [name for name in tensors if name.endswith(".post_attention_layernorm.weight")]:
        scales = torch.ones_like(tensors[norm])
        for channel, size in zip(range(0, len(scales), 16), itertools.cycle(sizes)):
            scales[channel] = size
        tensors[norm] /= scales
        mlp = norm.replace("post_attention_layernorm.weight", "mlp.")
        for name in tensors:
            if name.startswith(mlp) and not name.endswith("down_proj.weight"):
                tensors[name] *= scales
    save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
