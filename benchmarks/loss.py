"""Cost of the loss hook against Miles' own policy loss and a plain reference, on the same logits.

    python benchmarks/loss.py --tokens 1024                # CPU; --device cuda on a GPU

One tensor-parallel shard of two, V = 248,320, so 124,160 columns; a head of 128 or top-p supports whose sizes are like
those measured at top-p 0.97 (mean 8, median 2, p99 82). Each path runs forward and backward to the gradient of the
logits, in a process of its own, and is charged for everything it needs: Miles 0.0.2 takes fp32 logits only, so with
bf16 logits the cast to fp32 that Megatron makes for it counts. Extra memory is the peak above logits, data and warm
process; it includes the gradient of the logits, which no path can do without. Times are the best of the repeats;
on the CPU the allocator keeps freed memory meanwhile, so that no path pays for page faults twice.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from miles_mixprec.loss import policy
from miles_mixprec.rollout.record import Source, Support

VOCAB, TP, HEAD = 248_320, 2, 128
COLUMNS = VOCAB // TP
PATHS = {
    "miles": "Miles policy loss (PG only)",
    "miles-entropy": "Miles policy loss with entropy",
    "reference": "plain SC+MIS: separate passes, fp32 copies",
    "sc_mis": "this hook, SC+MIS, head 128",
    "sc_mis_top_p": "this hook, SC+MIS+top-p support",
}


def make_batch(tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
    """Logits [1, T, V/TP] and a micro-batch of four samples whose sampler is a noisy copy of the trainer."""
    generator = torch.Generator().manual_seed(0)
    rng = np.random.default_rng(0)
    samples, prompt = 4, 16
    total = tokens // samples
    response = total - prompt
    logits = torch.empty(1, total * samples, COLUMNS, dtype=dtype)
    batch: dict[str, Any] = {
        "total_lengths": [total] * samples,
        "response_lengths": [response] * samples,
        "loss_masks": [torch.ones(response, dtype=torch.int, device=device)] * samples,
        "advantages": [torch.full((response,), float(a), device=device) for a in (0.75, -0.25, -0.25, -0.25)],
        "log_probs": None,
        "mixprec_source": [],
    }
    keys = ("unconcat_tokens", "rollout_log_probs", "rollout_topk_token_ids", "rollout_topk_log_probs")
    batch |= {key: [] for key in (*keys, "rollout_sampling_mask")}
    for i in range(samples):
        rows = logits[0, i * total : (i + 1) * total]
        for row in rows:
            row.copy_(torch.randn(COLUMNS, generator=generator) * 1.5)
            row[torch.randint(0, COLUMNS, (8,), generator=generator)] += 12
        scored = rows[prompt - 1 : total - 1]
        top, ids = (torch.stack(x) for x in zip(*(row.float().topk(512) for row in scored), strict=True))
        top += torch.randn(top.shape, generator=generator) * 0.05
        log_q = top - torch.logsumexp(top, dim=1, keepdim=True) + math.log(0.98)
        sizes = np.clip(np.floor(np.exp(rng.normal(math.log(2.2), 1.6, response))), 1, 512).astype(np.int64)
        pick = torch.from_numpy(np.minimum(rng.geometric(0.6, response) - 1, sizes - 1))[:, None]
        sampled = ids.gather(1, pick)[:, 0]
        kept = torch.arange(512)[None] < torch.from_numpy(sizes)[:, None]
        row_log_q = log_q - torch.logsumexp(log_q.masked_fill(~kept, -math.inf), dim=1, keepdim=True)
        support = Support(
            np.concatenate(([0], np.cumsum(sizes))), ids[kept].int().numpy(), row_log_q[kept].float().numpy()
        )
        batch["unconcat_tokens"].append(torch.cat((torch.zeros(prompt, dtype=torch.long), sampled)).to(device))
        batch["rollout_log_probs"].append(
            {"head": log_q.gather(1, pick)[:, 0].to(device), "support": row_log_q.gather(1, pick)[:, 0].to(device)}
        )
        batch["rollout_topk_token_ids"].append(ids[:, :HEAD].int().numpy())
        batch["rollout_topk_log_probs"].append(log_q[:, :HEAD].float().numpy())
        batch["rollout_sampling_mask"].append(support)
        batch["mixprec_source"].append(Source("bf16", "bf16", np.zeros(response, np.int32), 1.0))
    return logits.to(device), batch


def hook(arm: str, batch: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    args = Namespace(
        qkv_format="thd",
        allgather_cp=False,
        vocab_size=COLUMNS,
        log_probs_chunk_size=-1,
        mixprec={
            "fleet": {
                "name": "bench",
                "model": "-",
                "context_length": 4096,
                "pools": {"bf16": {"view": "bf16", "slots_per_engine": 1}},
            },
            "algo": {"name": arm, "score_centering": True, "weights": "mis"}
            | ({"head": HEAD} if arm == "sc_mis" else {"top_p": 0.97, "top_k": 512}),
            "weights": {"store": "-"},
            **{"run_dir": "-", "run_id": "-", "updates": 1, "prompts_per_update": 1},
        },
    )
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean

    reducer = get_sum_of_sample_mean(batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], True)
    return lambda logits: policy.policy_loss(args, batch, logits, reducer)[0]


def miles_loss(batch: dict[str, Any], entropy: bool) -> Callable[[Tensor], Tensor]:
    from miles.backends.training_utils import loss
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean

    function = loss.policy_loss_function
    args = Namespace(
        **{"qkv_format": "thd", "rollout_temperature": 1.0, "log_probs_chunk_size": -1, "true_on_policy_mode": False},
        **{"allgather_cp": False, "vocab_size": COLUMNS, "entropy_coef": 1e-9 if entropy else 0.0, "use_opsm": False},
        **{"use_rollout_logprobs": True, "advantage_estimator": "grpo", "eps_clip": 0.2, "eps_clip_high": 0.28},
        **{"use_tis": False, "get_mismatch_metrics": False, "use_kl_loss": False, "calculate_per_token_loss": True},
    )
    reducer = get_sum_of_sample_mean(batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], True)
    return lambda logits: function(args, batch, logits.float(), reducer)[0]


def reference(batch: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """SC+MIS as usually written: a log-softmax for the sampled token, another for the head, coefficients on it."""
    prompts = [t - r for t, r in zip(batch["total_lengths"], batch["response_lengths"], strict=True)]
    starts = np.concatenate(([0], np.cumsum(batch["total_lengths"])))[:-1]
    device = batch["advantages"][0].device

    def loss(logits: Tensor) -> Tensor:
        result = logits.new_zeros((), dtype=torch.float32)
        for i, (start, prompt) in enumerate(zip(starts, prompts, strict=True)):
            rows = slice(int(start) + prompt - 1, int(start) + batch["total_lengths"][i] - 1)
            sampled = batch["unconcat_tokens"][i][prompt:, None]
            head = torch.from_numpy(batch["rollout_topk_token_ids"][i]).long().to(device)
            q = torch.from_numpy(batch["rollout_topk_log_probs"][i]).to(device).exp()
            log_p = torch.log_softmax(logits[0, rows].float(), dim=-1).gather(1, sampled)[:, 0]
            log_p_head = torch.log_softmax(logits[0, rows].float(), dim=-1).gather(1, head)
            ratio = (log_p.detach() - batch["rollout_log_probs"][i]).exp()
            w = ratio.where((ratio >= 0.5) & (ratio <= 5), 0.0)
            p = log_p_head.detach().exp()
            rho = (1 - q.sum(1)).clamp(min=1e-6) / (1 - p.sum(1)).clamp(min=1e-6)
            alpha = ((1 / rho >= 0.5) & (1 / rho <= 5)).float()
            coefficient = p.where((p / q >= 0.5) & (p / q <= 5), 0.0) - alpha[:, None] * p
            result = result - (batch["advantages"][i] * (w * log_p - (coefficient * log_p_head).sum(1))).sum()
        return result

    return loss


def measure(path: str, tokens: int, device: str, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Best seconds of forward and backward, peak extra bytes, and the contracts' share, in this process."""
    logits, batch = make_batch(tokens, device, dtype)
    kind = "support" if path == "sc_mis_top_p" else "head"
    batch["rollout_log_probs"] = [x[kind] for x in batch["rollout_log_probs"]]
    single_process(device)
    loss = {
        "miles": lambda: miles_loss(batch, False),
        "miles-entropy": lambda: miles_loss(batch, True),
        "reference": lambda: reference(batch),
    }.get(path, lambda: hook(path, batch))()
    logits.requires_grad_()
    if path.startswith("sc_mis"):  # the recipe's flags are Miles' business; here there is no Miles run behind them
        policy.check_recipe = lambda args, algo: None

    def once() -> float:
        logits.grad = None
        begin = time.perf_counter()
        loss(logits).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    once()  # imports, compilation
    logits.grad = None
    base = memory(device)
    reset_peak(device)
    once()
    result = {"extra": memory(device, peak=True) - base}
    if device == "cpu":
        keep_freed_memory()
        once()
    result["seconds"] = min(once() for _ in range(repeats))
    if path.startswith("sc_mis"):
        result["contracts"] = contracts_seconds(loss, logits, repeats) / result["seconds"]
    return result


def contracts_seconds(loss: Callable[[Tensor], Tensor], logits: Tensor, repeats: int) -> float:
    """Best seconds that one call spends in the checks."""
    spent: list[float] = []
    inspectors = [(policy.MicroBatch, "inspect"), (policy.Tokens, "inspect")]

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begin = time.perf_counter()
            found = original(*args)
            spent.append(time.perf_counter() - begin)
            return found

        return call

    for owner, name in inspectors:
        setattr(owner, name, timed(getattr(owner, name)))
    totals = []
    for _ in range(repeats):
        spent.clear()
        loss(logits)
        totals.append(sum(spent))
    return min(totals)


def single_process(device: str) -> None:
    """Miles' parallel state of one process."""
    from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state

    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    one = GroupInfo(rank=0, size=1, group=dist.group.WORLD)
    more = {"indep_dp": one} if "indep_dp" in ParallelState.__dataclass_fields__ else {}
    set_parallel_state(ParallelState(one, one, one, one, one, one, one, **more))


def memory(device: str, peak: bool = False) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    key = "VmHWM" if peak else "VmRSS"
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def keep_freed_memory() -> None:
    """Tell glibc to reuse freed blocks of any size instead of giving them back."""
    libc = ctypes.CDLL("libc.so.6")
    m_trim_threshold, m_mmap_max = -1, -4
    libc.mallopt(m_mmap_max, 0)
    libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--paths", nargs="+", default=list(PATHS), choices=list(PATHS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.child, args.tokens, args.device, getattr(torch, args.dtype), args.repeats)))
        return
    found = {}
    options = ["--tokens", str(args.tokens), "--device", args.device, "--dtype", args.dtype]
    for path in args.paths:
        command = [sys.executable, "-W", "ignore", __file__, "--child", path, *options]
        command += ["--repeats", str(args.repeats)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        found[path] = json.loads(done.stdout.decode().splitlines()[-1])
        print(path, found[path], file=sys.stderr)
    table = Table(title=f"{args.tokens} tokens, {COLUMNS} of {VOCAB} columns, {args.dtype} logits, {args.device}")
    for column in ("path", "ms", "x Miles", "x reference", "extra MB", "x Miles", "x reference", "contracts"):
        table.add_column(column, justify="left" if column == "path" else "right")
    for path, row in found.items():
        ratios = {
            key: [f"{row[key] / found[other][key]:.2f}" if other in found else "-" for other in ("miles", "reference")]
            for key in ("seconds", "extra")
        }
        table.add_row(
            PATHS[path],
            f"{row['seconds'] * 1e3:.0f}",
            *ratios["seconds"],
            f"{row['extra'] / 1e6:.0f}",
            *ratios["extra"],
            f"{row['contracts']:.1%}" if "contracts" in row else "-",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
