"""The Miles hook: `--loss-type custom_loss --custom-loss-function-path miles_mixprec.loss.policy.policy_loss`.

Miles calls it once per micro-batch on every rank of the last pipeline stage. It finds the response tokens whose logits
this rank holds, checks what the samplers recorded about them, applies the estimator, and reduces with Miles' own
reducer, so that token means, dynamic batch sizes and context parallelism follow Miles. It keeps no state: running it
again on the same batch (`--recompute-loss-function`) gives the same result.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from miles_mixprec import miles
from miles_mixprec.config import Algo, from_args
from miles_mixprec.errors import ConfigError, ContractError
from miles_mixprec.loss import contracts, metrics
from miles_mixprec.loss.contracts import Violation
from miles_mixprec.loss.estimator import Estimate, Rule, on_head, on_support, take_rows
from miles_mixprec.loss.layout import Layout, LocalTokens, local_tokens
from miles_mixprec.loss.vocab import HeadScores, Shard, score_head, score_support


def policy_loss(
    args: Namespace,
    batch: Mapping[str, Any],
    logits: Tensor,
    sum_of_sample_mean: Callable[[Tensor], Tensor],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (0-d, with gradient, unscaled) and metrics (0-d, the same keys in the same order on every call).

    `logits` are [1, T, V/TP] (thd) or [B, S, V/TP] (bshd), fp32 or bf16, not divided by the temperature. `batch` is
    Miles' micro-batch with the entries `rollout_topk_token_ids`, `rollout_topk_log_probs`, `rollout_sampling_mask` and
    `mixprec_source` beside its own. Raises ConfigError for Miles flags that the arm cannot run with, ContractError for
    sampler data whose policy is `stop`.
    """
    run = _run(args)
    micro = MicroBatch.of(args, batch, logits)
    rejected = micro.inspect(run)
    tokens = micro.tokens(run, rejected)
    rejected |= micro.agree(tokens.inspect(run, micro))
    tokens = tokens.without(rejected)

    estimate = tokens.estimate(run, logits.flatten(0, -2), micro.shard)
    losses = micro.spread(estimate.loss, tokens)
    pg_loss = loss = sum_of_sample_mean(losses)
    pairs = metrics.token_pairs(estimate, tokens.rule, tokens.lag)
    if run.algo.kl_coef > 0:
        kl = tokens.reference_kl(run, logits.flatten(0, -2), micro.shard)
        loss = loss + run.algo.kl_coef * sum_of_sample_mean(micro.spread(kl, tokens))
        pairs["reference_kl"] = metrics.Pair(kl.detach())
        pairs["reference_invalid"] = metrics.Pair((kl.detach() >= metrics.K3_LIMIT).float())
    report = {"loss": loss.detach().clone(), "pg_loss": pg_loss.detach().clone()}
    report |= metrics.sums(pairs, tokens.groups(run, micro.pools))
    report |= metrics.sums({"kl": pairs["kl"]}, metrics.lag_groups(tokens.lag))
    report |= micro.rejections(run, rejected)
    return loss, report


@dataclass(frozen=True)
class Run:
    """What the configuration fixes for every micro-batch."""

    algo: Algo
    view_of: dict[str, str]  # pool -> view
    chunk_rows: int | None  # --log-probs-chunk-size

    @property
    def views(self) -> list[str]:
        return list(dict.fromkeys(self.view_of.values()))

    @property
    def head(self) -> bool:
        return self.algo.score_centering and not self.algo.support

    def rule(self, pools: Sequence[str], sample: np.ndarray, device: torch.device) -> Rule:
        """The weight rule of tokens of `sample` [T], where `pools` is one per sample."""
        algo = self.algo
        if not algo.bounds_by_view:
            return Rule(algo.weights, *algo.bounds)
        bounds = [algo.bounds_by_view.get(self.view_of.get(pool, ""), algo.bounds) for pool in pools]
        low, high = torch.from_numpy(np.asarray(bounds, dtype=np.float32)[sample]).to(device).unbind(dim=1)
        return Rule(algo.weights, low, high)


_last_run: tuple[Any, Run] | None = None


def _run(args: Namespace) -> Run:
    global _last_run
    if _last_run is None or _last_run[0] is not args.mixprec:
        config = from_args(args)
        check_recipe(args, config.algo)
        contracts.check_policy(config.algo.contracts)
        view_of = {name: pool.view for name, pool in config.fleet.pools.items()}
        chunk_rows = args.log_probs_chunk_size if args.log_probs_chunk_size > 0 else None
        _last_run = args.mixprec, Run(config.algo, view_of, chunk_rows)
    return _last_run[1]


def check_recipe(args: Namespace, algo: Algo) -> None:
    """Raise ConfigError, naming the flags to set, unless Miles is set up for the arm's recipe.

    The estimator is REINFORCE with the sampler's own log-probs: no PPO clip, no second correction, the mean and the
    advantages of the arm.
    """
    wanted: list[tuple[str, Any, str]] = [
        ("advantage_estimator", "grpo", "--advantage-estimator grpo"),
        ("use_rollout_logprobs", True, "--use-rollout-logprobs"),
        ("calculate_per_token_loss", algo.token_mean, "--calculate-per-token-loss (iff algo.token_mean)"),
        (
            "grpo_std_normalization",
            algo.std_normalization,
            "--disable-grpo-std-normalization (iff not algo.std_normalization)",
        ),
        ("rewards_normalization", True, "no --disable-rewards-normalization"),
        ("normalize_advantages", False, "no --normalize-advantages"),
        ("use_tis", False, "no --use-tis"),
        ("use_opsm", False, "no --use-opsm"),
        ("use_opd", False, "no --use-opd"),
        ("custom_pg_loss_reducer_function_path", None, "no --custom-pg-loss-reducer-function-path"),
        ("true_on_policy_mode", False, "no --true-on-policy-mode"),
        ("entropy_coef", 0, "--entropy-coef 0"),
        ("kl_coef", 0, "--kl-coef 0 (use algo.kl_coef)"),
        ("use_kl_loss", algo.kl_coef > 0, "--use-kl-loss (iff algo.kl_coef > 0)"),
        ("kl_loss_coef", algo.kl_coef, f"--kl-loss-coef {algo.kl_coef:g}"),
        ("rollout_temperature", algo.temperature, f"--rollout-temperature {algo.temperature:g}"),
        ("rollout_top_p", algo.top_p, f"--rollout-top-p {algo.top_p:g}"),
        ("rollout_top_k", algo.top_k, f"--rollout-top-k {algo.top_k}"),
    ]
    # A flag that this Miles does not have cannot be set against the recipe.
    wrong = [flag for name, value, flag in wanted if (vars(args).get(name, value) or 0) != (value or 0)]
    if wrong:
        raise ConfigError(f"algo {algo.name} cannot run with these Miles flags; set: {', '.join(wrong)}")


@dataclass(frozen=True)
class MicroBatch:
    """Miles' micro-batch on this rank."""

    batch: Mapping[str, Any]
    shard: Shard
    cp: miles.Group
    scored: LocalTokens  # response tokens whose logits this rank holds
    reduced: LocalTokens  # those that its masks, advantages and reducer cover; differ under all-gather CP
    starts: np.ndarray  # [samples + 1] of the responses, laid end to end
    device: torch.device

    @staticmethod
    def of(args: Namespace, batch: Mapping[str, Any], logits: Tensor) -> MicroBatch:
        tp, cp = miles.tensor_parallel(), miles.context_parallel()
        all_gather = cp.size > 1 and bool(args.allgather_cp)
        layout = Layout(
            batch["total_lengths"],
            batch["response_lengths"],
            batch.get("max_seq_lens") if args.qkv_format == "bshd" else None,
            cp.rank,
            cp.size,
            all_gather,
            logits.size(1),
        )
        scored = local_tokens(layout)
        return MicroBatch(
            batch=batch,
            shard=Shard(args.vocab_size or logits.size(-1) * tp.size, tp.rank, tp.process_group),
            cp=cp,
            scored=scored,
            reduced=local_tokens(replace(layout, all_gather=False)) if all_gather else scored,
            starts=np.concatenate(([0], np.cumsum(batch["response_lengths"]))).astype(np.int64),
            device=logits.device,
        )

    @property
    def pools(self) -> list[str]:
        return ["unknown" if source is None else source.pool for source in self.column("mixprec_source")]

    def column(self, key: str) -> Sequence[Any]:
        values = self.batch.get(key)
        return [None] * len(self.batch["response_lengths"]) if values is None else values

    def inspect(self, run: Run) -> set[int]:
        """Samples to reject for what can be seen without looking at a token. Raises ContractError."""
        rejected = set()
        columns = map(self.column, ("mixprec_source", "rollout_topk_token_ids", "rollout_topk_log_probs"))
        rows = zip(*columns, self.column("rollout_sampling_mask"), self.batch["response_lengths"], strict=True)
        for i, (source, head_ids, head_log_q, support, length) in enumerate(rows):
            failed = _misfit(run, source, head_ids, head_log_q, support, length)
            if failed is None and length and self.batch["total_lengths"][i] <= length:
                failed = "shape", float(length)
            if failed is not None:
                pool = "unknown" if source is None else source.pool
                violation = Violation(failed[0], i, None, pool, failed[1])
                contracts.settle(violation, run.algo.contracts)
                contracts.logger.warning("rejected: %s", violation)
                rejected.add(i)
        return rejected

    def tokens(self, run: Run, rejected: set[int]) -> Tokens:
        """The active response tokens of the samples that are left."""
        batch, local = self.batch, self.scored
        mask = torch.cat(self._aligned("loss_masks", np.asarray(batch["response_lengths"]))).cpu().numpy() != 0
        index = self.starts[local.sample] + local.position
        active = np.flatnonzero(mask[index] & ~np.isin(local.sample, list(rejected)))
        sample, position = local.sample[active], local.position[active]
        names = ["advantages", "rollout_log_probs"] + ["ref_log_probs"] * (run.algo.kl_coef > 0)
        held = np.bincount(self.reduced.sample, minlength=len(batch["response_lengths"]))
        columns = [torch.cat(self._aligned(name, held)).float() for name in names]
        values = self._at_scored(torch.stack(columns, dim=1).detach())
        place = self._to_device(active)
        values = values[place]
        token_starts = np.concatenate(([0], np.cumsum(batch["total_lengths"])))
        prompts = np.asarray(batch["total_lengths"]) - np.asarray(batch["response_lengths"])
        where = self._to_device(token_starts[sample] + prompts[sample] + position)
        sources = self.column("mixprec_source")
        versions = _take([None if s is None else s.weight_versions for s in sources], sample, position, (), np.int32)
        lag = np.where(versions >= 0, float(miles.trainer_version()) - versions, np.nan)
        sets: tuple[Tensor, ...] = ()
        if run.algo.support:
            sets = self._support(sample, position)
        elif run.head:
            keys = (("rollout_topk_token_ids", np.int32), ("rollout_topk_log_probs", np.float32))
            heads = [_take(self.column(key), sample, position, (run.algo.head,), kind) for key, kind in keys]
            sets = tuple(map(self._to_device, heads))
        return Tokens(
            rows=torch.from_numpy(local.rows[active]),
            place=place,
            sample=sample,
            position=position,
            sampled_ids=torch.cat(list(batch["unconcat_tokens"])).to(self.device)[where],
            advantages=values[:, 0],
            log_q=values[:, 1],
            reference=values[:, 2] if run.algo.kl_coef > 0 else None,
            sets=sets,
            lag=self._to_device(lag.astype(np.float32)),
            rule=run.rule(self.pools, sample, self.device),
        )

    def agree(self, rejected: set[int]) -> set[int]:
        """The union over the context-parallel ranks, which see different tokens of the same samples."""
        if self.cp.process_group is None:
            return rejected
        flags = torch.zeros(len(self.starts) - 1, dtype=torch.int32, device=self.device)
        flags[list(rejected)] = 1
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.cp.process_group)
        return set(flags.nonzero()[:, 0].tolist())

    def spread(self, values: Tensor, tokens: Tokens) -> Tensor:
        """Values of `tokens` laid out as the reducer wants them, zero elsewhere, joined to the graph in any case."""
        local = values.new_zeros(self.scored.rows.size).index_put((tokens.place,), values)
        if self.scored is not self.reduced:
            full = local.new_zeros(int(self.starts[-1])).index_put((self._index(self.scored),), local)
            local = _SumOverRanks.apply(full, self.cp.process_group)[self._index(self.reduced)]
        return local

    def rejections(self, run: Run, rejected: set[int]) -> dict[str, Tensor]:
        counted = self.cp.rank == 0  # every rank of the group knows of them; the sum must know once
        pools = np.asarray(self.pools, dtype=object)
        bad = np.isin(np.arange(pools.size), list(rejected))
        groups = {"all": np.ones(pools.size, dtype=bool)} | {f"pool/{name}": pools == name for name in run.view_of}
        report = {}
        for group, member in groups.items():
            report[f"mixprec/{group}/rejected_num"] = torch.tensor(float(counted * (member & bad).sum()))
            report[f"mixprec/{group}/rejected_den"] = torch.tensor(float(counted * member.sum()))
        return report

    def _aligned(self, key: str, lengths: np.ndarray) -> list[Tensor]:
        """Miles' entry `key`, whose samples must have these lengths. Raises ContractError."""
        values = list(self.batch[key])
        found = [value.numel() for value in values]
        if found != lengths.tolist():
            i = next(i for i, (a, b) in enumerate(zip(found, lengths, strict=True)) if a != b)
            raise ContractError(
                f"sample {i} of pool {self.pools[i]}: {key} has {found[i]} values for {lengths[i]} response tokens; "
                "the generate hook must return one per token"
            )
        return values

    def _at_scored(self, values: Tensor) -> Tensor:
        if self.scored is self.reduced:
            return values
        full = values.new_zeros(int(self.starts[-1]), values.size(1))
        full[self._index(self.reduced)] = values
        return _summed(full, self.cp.process_group)[self._index(self.scored)]

    def _support(self, sample: np.ndarray, position: np.ndarray) -> tuple[Tensor, ...]:
        """(offsets, ids, log q) of the tokens' supports."""
        supports = self.column("rollout_sampling_mask")
        counts, ids = [np.zeros(1, dtype=np.int64)], [np.zeros(0, dtype=np.int32)]
        log_q = [np.zeros(0, dtype=np.float32)]
        for i in np.unique(sample):
            support, rows = supports[i], position[sample == i]
            count = np.diff(support.offsets)[rows]
            taken = np.repeat(support.offsets[rows] - np.cumsum(count) + count, count) + np.arange(count.sum())
            counts.append(count)
            ids.append(support.ids[taken])
            log_q.append(support.log_probs[taken])
        offsets = np.cumsum(np.concatenate(counts))
        return tuple(self._to_device(x) for x in (offsets, np.concatenate(ids), np.concatenate(log_q)))

    def _index(self, tokens: LocalTokens) -> Tensor:
        return self._to_device(self.starts[tokens.sample] + tokens.position)

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Tokens:
    """The active response tokens of a rank, [T] each; what needs no device stays on the host."""

    rows: Tensor  # of the flattened logits, on the host
    place: Tensor  # among the rank's scored tokens
    sample: np.ndarray
    position: np.ndarray
    sampled_ids: Tensor
    advantages: Tensor
    log_q: Tensor
    reference: Tensor | None
    sets: tuple[Tensor, ...]  # (head ids, head log q), (support offsets, ids, log q) or nothing
    lag: Tensor
    rule: Rule

    def inspect(self, run: Run, micro: MicroBatch) -> set[int]:
        """Samples to reject for what their tokens hold. Raises ContractError."""
        if not self.sample.size:
            return set()
        own = (self.sampled_ids, self.log_q, self.advantages, micro.shard.size)
        check = {0: contracts.check_sampled, 2: contracts.check_head, 3: contracts.check_support}[len(self.sets)]
        findings = check(*self.sets, *own)  # type: ignore[operator]
        sample, position = torch.from_numpy(self.sample), torch.from_numpy(self.position)
        return contracts.judge(findings, sample, position, micro.pools, run.algo.contracts)

    def without(self, rejected: set[int]) -> Tokens:
        keep_host = np.flatnonzero(~np.isin(self.sample, list(rejected)))
        if keep_host.size == self.sample.size:
            return self
        keep_rows = torch.from_numpy(keep_host)
        keep = keep_rows.to(self.place.device)
        sets = take_rows(self.sets[0], keep, *self.sets[1:]) if len(self.sets) == 3 else [x[keep] for x in self.sets]
        on_device = ("place", "sampled_ids", "advantages", "log_q", "lag") + ("reference",) * (
            self.reference is not None
        )
        return replace(
            self,
            rows=self.rows[keep_rows],
            sample=self.sample[keep_host],
            position=self.position[keep_host],
            sets=tuple(sets),
            rule=self.rule.at(keep),
            **{name: getattr(self, name)[keep] for name in on_device},
        )

    def estimate(self, run: Run, logits: Tensor, shard: Shard) -> Estimate:
        """The estimator on these tokens; also joins `logits` to the graph where there are none."""
        temperature, centering = run.algo.temperature, run.algo.score_centering
        if len(self.sets) == 3:
            offsets, ids, log_q = self.sets
            log_p = score_support(logits, offsets, ids, shard=shard, rows=self.rows, temperature=temperature)
            return on_support(log_p, offsets, ids, log_q, self.sampled_ids, self.advantages, self.rule, centering)
        head_ids, head_log_q = self.sets or (self.sampled_ids[:, None][:, :0], self.log_q[:, None][:, :0])
        scores = self._score(run, logits, shard, head_ids, entropy=True)
        return on_head(
            scores, head_ids, head_log_q, self.sampled_ids, self.log_q, self.advantages, self.rule, centering
        )

    def reference_kl(self, run: Run, logits: Tensor, shard: Shard) -> Tensor:
        """k3 of KL(trainer || reference) [T] over the whole vocabulary, whatever the sampler kept."""
        assert self.reference is not None
        scores = self._score(run, logits, shard, self.sampled_ids[:, None][:, :0], entropy=False)
        return metrics.k3(self.reference - scores.sampled)

    def _score(self, run: Run, logits: Tensor, shard: Shard, head_ids: Tensor, entropy: bool) -> HeadScores:
        return score_head(
            logits,
            self.sampled_ids,
            head_ids,
            shard=shard,
            rows=self.rows,
            temperature=run.algo.temperature,
            entropy=entropy,
            chunk_rows=run.chunk_rows,
        )

    def groups(self, run: Run, pools: Sequence[str]) -> dict[str, Tensor]:
        views = [run.view_of.get(pool) for pool in pools]
        member = {"all": [True] * len(pools)}
        member |= {f"pool/{name}": [pool == name for pool in pools] for name in run.view_of}
        member |= {f"view/{name}": [view == name for view in views] for name in run.views}
        table = torch.tensor(list(member.values()), dtype=torch.bool)[:, torch.from_numpy(self.sample)]
        return dict(zip(member, table.to(self.place.device), strict=True))


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduced gradient: each rank's loss sees a part of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(grad, ctx.group), None


def _summed(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    values = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(values, group=group)
    return values


def _misfit(
    run: Run, source: Any, head_ids: Any, head_log_q: Any, support: Any, length: int
) -> tuple[str, float] | None:
    """The check that a sample fails as a whole, and the value to show."""
    algo = run.algo
    if source is None or (run.head and head_ids is None) or (algo.support and support is None):
        return "missing", 0.0
    if run.view_of.get(source.pool) != source.view:
        return "source", 0.0
    if abs(source.temperature - algo.temperature) > 1e-6 * algo.temperature:
        return "temperature", source.temperature
    fits = source.weight_versions.shape == (length,)
    if run.head:
        fits &= head_ids.shape == head_log_q.shape == (length, algo.head)
    if not fits:
        return "shape", float(length)
    if algo.support:
        offsets, size = support.offsets, support.ids.size
        good = offsets.shape == (length + 1,) and support.ids.shape == support.log_probs.shape == (size,)
        if not (good and offsets[0] == 0 and offsets[-1] == size and (np.diff(offsets) >= 0).all()):
            return "offsets", float(offsets.size)
    return None


def _take(
    arrays: Sequence[Any], sample: np.ndarray, position: np.ndarray, shape: tuple[int, ...], kind: type
) -> np.ndarray:
    """Row `position` of its sample's array for each token; tokens are sorted by sample, rows are `shape`."""
    parts = [np.zeros((0, *shape), dtype=kind), *(arrays[i][position[sample == i]] for i in np.unique(sample))]
    return np.concatenate(parts)
