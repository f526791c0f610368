"""A micro-batch as Miles hands it to a loss, on any rank of a TP x CP grid, with the real Miles underneath.

Run as a program it starts four gloo processes; on each grid every rank computes the undistributed result, then its
own part, and compares. It prints a JSON line per grid and scenario.
"""

import dataclasses
import json
import os
import tempfile
from argparse import Namespace

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from miles_mixprec.rollout.record import Source, Support

VOCAB, PADDED = 61, 64
HEAD = 5
POOLS = {"a": "bf16", "b": "fp8"}
ARMS = {
    "grpo": {"name": "grpo", "std_normalization": True},
    "mis": {"name": "mis", "weights": "mis", "std_normalization": True},
    "sc": {"name": "sc", "score_centering": True, "head": HEAD},
    "sc_mis": {"name": "sc_mis", "score_centering": True, "weights": "mis", "head": HEAD},
    "sc_tis": {"name": "sc_tis", "score_centering": True, "weights": "tis", "bounds": [0.0, 2.0], "head": HEAD},
    "sc_mis_top_p": {
        "name": "sc_mis_top_p",
        "score_centering": True,
        "weights": "mis",
        "top_p": 0.9,
        "top_k": 16,
    },
}
TEMPERATURE = 0.7


def mixprec(arm, **algo):
    pools = {
        name: {"view": view, "slots_per_engine": 1, "execution": "native" if view == "bf16" else "dequantized"}
        for name, view in POOLS.items()
    }
    return {
        "fleet": {"name": "test", "model": "tiny", "context_length": 64, "pools": pools},
        "algo": {"temperature": TEMPERATURE, **ARMS[arm], **algo},
        "weights": {"store": "store"},
        "run_dir": "run",
        "run_id": "run",
        "updates": 1,
        "prompts_per_update": 1,
    }


def miles_args(config, **over):
    algo = config["algo"]
    values = {
        "mixprec": config,
        "qkv_format": "thd",
        "allgather_cp": False,
        "vocab_size": VOCAB,
        "loss_type": "custom_loss",
        "custom_loss_function_path": "miles_mixprec.loss.policy.policy_loss",
        "advantage_estimator": "grpo",
        "use_rollout_logprobs": True,
        "calculate_per_token_loss": algo.get("token_mean", True),
        "grpo_std_normalization": algo.get("std_normalization", False),
        "rewards_normalization": True,
        "normalize_advantages": False,
        "use_tis": False,
        "use_opsm": False,
        "use_opd": False,
        "custom_pg_loss_reducer_function_path": None,
        "true_on_policy_mode": False,
        "entropy_coef": 0.0,
        "kl_coef": 0.0,
        "use_kl_loss": algo.get("kl_coef", 0) > 0,
        "kl_loss_coef": algo.get("kl_coef", 0.0),
        "rollout_temperature": TEMPERATURE,
        "rollout_top_p": algo.get("top_p", 1.0),
        "rollout_top_k": algo.get("top_k", -1),
        "recompute_loss_function": False,
        "use_dynamic_global_batch_size": False,
        "global_batch_size": 4,
        "log_probs_chunk_size": -1,
        "multi_lora": False,
    }
    return Namespace(**{**values, **over})


@dataclasses.dataclass
class Data:
    """Whole samples, undistributed: logits [total, PADDED], everything else per response token."""

    totals: list
    responses: list
    logits: list
    tokens: list
    masks: list
    advantages: list
    log_q: list
    reference: list
    head_ids: list
    head_log_q: list
    supports: list
    sources: list


def make_data(totals=(16, 9, 24, 12), responses=(7, 0, 11, 10), support=False, seed=0, noise=0.5, head=HEAD):
    """Samplers that differ from the trainer by `noise` on each logit, with tool tokens and one empty response."""
    rng = np.random.default_rng(seed)
    data = Data(list(totals), list(responses), *([] for _ in range(10)))
    for i, (total, length) in enumerate(zip(totals, responses, strict=True)):
        logits = rng.normal(size=(total, PADDED)).astype(np.float32) * 2
        logits[:, VOCAB:] = 50.0  # rows that only exist because Megatron pads: must not count
        tokens = rng.integers(0, VOCAB, total)
        mask = np.ones(length, dtype=np.int64)
        if i % 2 == 0:
            mask[2:5] = 0  # an observation between two turns
        z = logits[total - length - 1 : total - 1, :VOCAB].astype(np.float64)
        log_q = z / TEMPERATURE + rng.normal(size=z.shape) * noise
        log_q -= np.log(np.exp(log_q).sum(1, keepdims=True))
        order = np.argsort(-log_q, axis=1)
        offsets, ids, log_probs = [0], [], []
        own = np.zeros(length)
        for r in range(length):
            row = order[r]
            if mask[r] and support:
                q = np.exp(log_q[r, row])
                kept = row[: min(16, int(np.searchsorted(np.cumsum(q), 0.9)) + 1)]
                q = np.exp(log_q[r, kept])
                tokens[total - length + r] = kept[rng.choice(kept.size, p=q / q.sum())]
                ids += kept.tolist()
                row_log_q = log_q[r, kept] - np.log(q.sum())
                log_probs += row_log_q.tolist()
                own[r] = row_log_q[kept.tolist().index(tokens[total - length + r])]
            elif mask[r]:
                tokens[total - length + r] = rng.choice(VOCAB, p=np.exp(log_q[r]))
                own[r] = log_q[r, tokens[total - length + r]]
            else:
                own[r] = np.nan
            offsets.append(len(ids))
        top = order[:, :head].astype(np.int32)
        top_log_q = np.take_along_axis(log_q, order[:, :head], axis=1).astype(np.float32)
        top[mask == 0], top_log_q[mask == 0] = -1, -np.inf
        pool = list(POOLS)[i % 2]
        versions = np.where(mask > 0, np.arange(length) % 9, -1).astype(np.int32)
        data.logits.append(torch.from_numpy(logits))
        data.tokens.append(torch.from_numpy(tokens))
        data.masks.append(torch.from_numpy(mask).int())
        data.advantages.append(torch.full((length,), float(rng.normal())))
        data.log_q.append(torch.from_numpy(own).float())
        data.reference.append(torch.from_numpy(own * 0 - 3.0).float().nan_to_num(-3.0))
        data.head_ids.append(top)
        data.head_log_q.append(top_log_q)
        data.supports.append(
            Support(np.asarray(offsets, np.int64), np.asarray(ids, np.int32), np.asarray(log_probs, np.float32))
        )
        data.sources.append(Source(pool, POOLS[pool], versions, TEMPERATURE))
    return data


def zigzag(x, rank, size, length, fill=0):
    """The two chunks of `x` [n, ...], padded to 2 * size equal ones of a sequence of `length`."""
    chunk = -(-length // (2 * size))
    x = F.pad(x, (0, 0) * (x.dim() - 1) + (0, 2 * size * chunk - x.size(0)), value=fill)
    first, second = rank * chunk, (2 * size - 1 - rank) * chunk
    return torch.cat((x[first : first + chunk], x[second : second + chunk]))


def local_logits(data, layout, tp, cp):
    """This rank's logits as the model would put them out; `layout` is (qkv_format, all_gather)."""
    (tp_rank, tp_size), (cp_rank, cp_size) = tp, cp
    qkv_format, all_gather = layout
    longest = -(-max(data.totals) // 8) * 8
    parts = []
    for x in data.logits:
        if cp_size == 1:
            part = F.pad(x, (0, 0, 0, longest - x.size(0))) if qkv_format == "bshd" else x
        elif not all_gather:
            part = zigzag(x, cp_rank, cp_size, longest if qkv_format == "bshd" else x.size(0))
        elif qkv_format == "bshd":
            part = F.pad(x, (0, 0, 0, longest - x.size(0))).chunk(cp_size)[cp_rank]
        else:
            part = x
        parts.append(part)
    if qkv_format == "bshd":
        full = torch.stack(parts)
    else:
        full = torch.cat(parts)
        full = F.pad(full, (0, 0, 0, -full.size(0) % 16))
        full = (full.chunk(cp_size)[cp_rank] if all_gather and cp_size > 1 else full)[None]
    return full.chunk(tp_size, dim=-1)[tp_rank].contiguous()


def local_batch(data, layout, cp):
    """Miles' micro-batch on this rank: per-token lists are sliced zigzag whatever the layout of the logits."""
    cp_rank, cp_size = cp
    longest = -(-max(data.totals) // 8) * 8
    bshd = layout[0] == "bshd"

    def sliced(values):
        if cp_size == 1:
            return values
        out = []
        for x, total, length in zip(values, data.totals, data.responses, strict=True):
            at = torch.arange(total)  # position l scores response token l - (prompt - 1)
            at = zigzag(at, cp_rank, cp_size, longest if bshd else total, fill=-1)
            r = at - (total - length - 1)
            r = r[(at >= 0) & (r >= 0) & (r < length)]
            out.append(x[r])
        return out

    return {
        "unconcat_tokens": data.tokens,
        "tokens": torch.cat(data.tokens)[None],
        "total_lengths": data.totals,
        "response_lengths": data.responses,
        "max_seq_lens": [longest] * len(data.totals) if bshd else None,
        "loss_masks": data.masks,
        "advantages": sliced(data.advantages),
        "rollout_log_probs": sliced(data.log_q),
        "log_probs": None,
        "ref_log_probs": sliced(data.reference),
        "rollout_topk_token_ids": data.head_ids,
        "rollout_topk_log_probs": data.head_log_q,
        "rollout_sampling_mask": data.supports,
        "mixprec_source": data.sources,
    }


def set_parallel(tp=(0, 1, None), cp=(0, 1, None)):
    """Miles' parallel state with these (rank, size, group); the rest is one process."""
    from miles.backends.training_utils.parallel import GroupInfo, ParallelState, set_parallel_state

    def info(x):
        return GroupInfo(rank=x[0], size=x[1], group=x[2], gloo_group=x[2])

    one = info((0, 1, None))
    names = {f.name for f in dataclasses.fields(ParallelState)}
    more = {"indep_dp": one} if "indep_dp" in names else {}
    set_parallel_state(
        ParallelState(intra_dp=one, intra_dp_cp=info(cp), cp=info(cp), tp=info(tp), pp=one, ep=one, etp=one, **more)
    )


def reducer(args, batch):
    from miles.backends.training_utils.cp_utils import get_sum_of_sample_mean

    return get_sum_of_sample_mean(
        batch["total_lengths"],
        batch["response_lengths"],
        batch["loss_masks"],
        args.calculate_per_token_loss,
        args.qkv_format,
        batch["max_seq_lens"],
    )


def run_loss(args, batch, logits):
    """(loss, gradient, metrics) of the hook, as the dispatcher calls it."""
    from miles_mixprec.loss.policy import policy_loss

    logits = logits.clone().requires_grad_()
    loss, report = policy_loss(args, batch, logits, reducer(args, batch))
    loss.backward()
    return loss.detach(), logits.grad, report


def dispatch(args, batch, logits):
    """(loss, normaliser, keys, values, gradient) through Miles' own `loss_function`."""
    from miles.backends.training_utils.loss import loss_function

    logits = logits.clone().requires_grad_()
    loss, normaliser, log = loss_function(args, batch, 1, logits, apply_megatron_loss_scaling=True)
    loss.backward()
    return loss.detach(), normaliser, log["keys"], log["values"], logits.grad


SCENARIOS = [
    ("sc_mis", ("thd", False), {}),
    ("sc_mis", ("bshd", False), {}),
    ("sc_mis", ("thd", True), {}),
    ("sc_mis", ("bshd", True), {}),
    ("sc_tis", ("thd", False), {"bounds_by_view": {"fp8": [0.1, 3.0]}}),
    ("sc", ("thd", False), {"token_mean": False}),
    ("sc", ("thd", True), {"token_mean": False, "kl_coef": 0.1}),
    ("mis", ("thd", False), {}),
    ("sc_mis_top_p", ("thd", False), {"kl_coef": 0.1}),
    ("sc_mis_top_p", ("bshd", False), {}),
    ("sc_mis_top_p", ("thd", True), {}),
    ("sc_mis", ("thd", False), {}, True),
]


def compare(arm, layout, algo, tp, cp, damage=False):
    """Largest differences between this rank's part and the undistributed run's."""
    data = make_data(support=arm.endswith("top_p"))
    if damage:
        data.head_ids[2][9, 0] = data.head_ids[2][9, 1]  # one token of one sample, on one CP rank
    args = miles_args(mixprec(arm, **algo), qkv_format=layout[0], allgather_cp=layout[1])
    set_parallel()
    alone = local_batch(data, layout, (0, 1))
    loss, _, report = run_loss(args, alone, local_logits(data, layout, (0, 1), (0, 1)))
    whole = dataclasses.replace(data)
    # The undistributed gradient in sample order, then cut like the logits.
    packed = local_logits(data, ("thd", False), (0, 1), (0, 1))
    flat_args = miles_args(mixprec(arm, **algo))
    _, grad, _ = run_loss(flat_args, local_batch(data, ("thd", False), (0, 1)), packed)
    whole.logits = list(grad[0][: sum(data.totals)].split(data.totals))
    set_parallel(tp, cp)
    part_loss, part_grad, part_report = run_loss(
        args, local_batch(data, layout, cp[:2]), local_logits(data, layout, tp[:2], cp[:2])
    )
    sums = torch.stack([part_loss, *part_report.values()]).double()
    if cp[2] is not None:
        dist.all_reduce(sums, group=cp[2])
    alone_sums = torch.stack([loss, *report.values()]).double()
    return {
        "grad": float((part_grad - local_logits(whole, layout, tp[:2], cp[:2])).abs().max()),
        "size": float(grad.abs().max()),
        "sums": float(((sums - alone_sums) / alone_sums.abs().clamp(min=1)).abs().max()),
        "same_keys": list(report) == list(part_report),
    }


GRIDS = [(2, 1), (4, 1), (1, 2), (1, 4), (2, 2)]  # (tp, cp)


def _rank(rank, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    for tp_size, cp_size in GRIDS:
        # Smaller grids run in copies side by side.
        tp, cp = (0, 1, None), (0, 1, None)
        for base in range(0, 4, tp_size * cp_size):
            for c in range(cp_size):
                ranks = [base + c * tp_size + t for t in range(tp_size)]
                group = dist.new_group(ranks)
                if rank in ranks and tp_size > 1:
                    tp = (ranks.index(rank), tp_size, group)
            for t in range(tp_size):
                ranks = [base + c * tp_size + t for c in range(cp_size)]
                group = dist.new_group(ranks)
                if rank in ranks and cp_size > 1:
                    cp = (ranks.index(rank), cp_size, group)
        for scenario in SCENARIOS:
            arm, layout, algo = scenario[:3]
            if layout[1] and cp_size == 1:
                continue
            everyone = [None] * 4
            dist.all_gather_object(everyone, compare(arm, layout, algo, tp, cp, *scenario[3:]))
            if rank == 0:
                worst = {key: max(x[key] for x in everyone) for key in ("grad", "size", "sums")}
                worst["same_keys"] = all(x["same_keys"] for x in everyone)
                print(json.dumps({"grid": [tp_size, cp_size], "scenario": str(scenario), **worst}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    import miles.backends.training_utils.loss  # noqa: F401  once, before the fork

    with tempfile.TemporaryDirectory() as scratch:
        mp.start_processes(_rank, (os.path.join(scratch, "rendezvous"),), nprocs=4, start_method="fork")
