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
from miles_mixprec.loss.estimator import Estimate, Rule, empty_head, on_head, on_support
from miles_mixprec.loss.layout import Layout, LocalTokens, local_tokens
from miles_mixprec.loss.vocab import HeadScores, Shard, score_head, score_support

# What the carrier adds to Miles' micro-batch: source, head's ids and log-probs, support, one of each per sample.
_ENTRIES = ("mixprec_source", "rollout_topk_token_ids", "rollout_topk_log_probs", "rollout_sampling_mask")


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
    micro = MicroBatch.of(args, batch, logits)
    rejected = micro.inspect()
    tokens = micro.tokens(rejected)
    if found := micro.agree(tokens.inspect()):
        rejected |= found
        tokens = micro.tokens(rejected)

    estimate = tokens.estimate(logits.flatten(0, -2))
    pg_loss = loss = sum_of_sample_mean(tokens.spread(estimate.loss))
    pairs = metrics.token_pairs(estimate, tokens.rule, tokens.lag)
    kl_coef = micro.run.algo.kl_coef
    if kl_coef > 0:
        kl = tokens.reference_kl(logits.flatten(0, -2))
        loss = loss + kl_coef * sum_of_sample_mean(tokens.spread(kl))
        pairs["reference_kl"] = metrics.Pair(kl.detach())
        pairs["reference_invalid"] = metrics.Pair((kl.detach() >= metrics.K3_LIMIT).float())
    report = {"loss": loss.detach().clone(), "pg_loss": pg_loss.detach().clone()}
    report |= metrics.sums(pairs, tokens.groups())
    report |= metrics.sums({"kl": pairs["kl"]}, metrics.lag_groups(tokens.lag))
    report |= micro.rejections(rejected)
    return loss, report


@dataclass(frozen=True)
class Run:
    """What the configuration fixes for every micro-batch."""

    algo: Algo
    view_of: dict[str, str]  # pool -> view
    chunk_rows: int | None  # --log-probs-chunk-size

    @property
    def head(self) -> bool:
        """The arm needs a recorded head."""
        return self.algo.score_centering and not self.algo.support

    def rule(self, pools: Sequence[str], sample: np.ndarray, device: torch.device) -> Rule:
        """The weight rule of tokens of `sample` [T], where `pools` is one per sample."""
        algo = self.algo
        if not algo.bounds_by_view:
            return Rule(algo.weights, *algo.bounds)
        bounds = [algo.bounds_by_view.get(self.view_of.get(pool, ""), algo.bounds) for pool in pools]
        low, high = torch.from_numpy(np.asarray(bounds, dtype=np.float32)[sample]).to(device).unbind(dim=1)
        return Rule(algo.weights, low, high)


_last_run: tuple[Any, Run] | None = None  # with the configuration that it was made of


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

    run: Run
    batch: Mapping[str, Any]
    pools: list[str]  # of each sample
    totals: np.ndarray  # prompt and response tokens of each sample, int64
    responses: np.ndarray
    shard: Shard
    cp: Any  # Miles' group over which sequences are sharded
    scored: LocalTokens  # response tokens whose logits this rank holds
    reduced: LocalTokens  # those that its masks, advantages and reducer cover; differ under all-gather CP
    device: torch.device

    @staticmethod
    def of(args: Namespace, batch: Mapping[str, Any], logits: Tensor) -> MicroBatch:
        state = miles.parallel_state()
        tp, cp = state.tp, state.cp
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
        sources = batch.get("mixprec_source") or [None] * len(batch["response_lengths"])
        return MicroBatch(
            run=_run(args),
            batch=batch,
            pools=["unknown" if source is None else source.pool for source in sources],
            totals=np.asarray(batch["total_lengths"], dtype=np.int64),
            responses=np.asarray(batch["response_lengths"], dtype=np.int64),
            shard=Shard(args.vocab_size or logits.size(-1) * tp.size, tp.rank, tp.group if tp.size > 1 else None),
            cp=cp,
            scored=scored,
            reduced=local_tokens(replace(layout, all_gather=False)) if all_gather else scored,
            device=logits.device,
        )

    def inspect(self) -> set[int]:
        """Samples to reject for what can be seen without looking at a token. Raises ContractError."""
        misfits = [(i, self._misfit(i)) for i in range(len(self.pools))]
        violations = [contracts.Violation(m[0], i, None, self.pools[i], m[1]) for i, m in misfits if m is not None]
        return contracts.settle(violations, self.run.algo.contracts)

    def _misfit(self, i: int) -> tuple[str, float] | None:
        """The check that sample `i` fails as a whole, and the value to show."""
        run, algo, length = self.run, self.run.algo, int(self.responses[i])
        source, head_ids, head_log_q, support = (self._column(key)[i] for key in _ENTRIES)
        if source is None or (run.head and head_ids is None) or (algo.support and support is None):
            return "missing", 0.0
        if run.view_of.get(source.pool) != source.view:
            return "source", 0.0
        if abs(source.temperature - algo.temperature) > 1e-6 * algo.temperature:
            return "temperature", source.temperature
        fits = source.weight_versions.shape == (length,) and (length == 0 or length < self.totals[i])
        if run.head:
            fits &= head_ids.shape == head_log_q.shape == (length, algo.head)
        if not fits:
            return "shape", float(length)
        if algo.support:
            (found,) = contracts.check_offsets(support.offsets, support.ids, support.log_probs, length)
            if found.bad:
                return found.check, float(found.value)
        return None

    def tokens(self, rejected: set[int]) -> Tokens:
        """The active response tokens of the samples that are left."""
        run, local = self.run, self.scored
        mask = self._joined("loss_masks", self.responses).cpu().numpy() != 0
        active = np.flatnonzero(mask[self._index(local)] & ~np.isin(local.sample, list(rejected)))
        sample, position = local.sample[active], local.position[active]
        place = self._to_device(active)
        held = np.bincount(self.reduced.sample, minlength=len(self.pools))
        names = ["advantages", "rollout_log_probs"] + ["ref_log_probs"] * (run.algo.kl_coef > 0)
        columns = torch.stack([self._joined(name, held).float() for name in names], dim=1).detach()
        advantages, log_q, *reference = self._to_scored(columns)[place].unbind(dim=1)
        where = self._to_device(np.cumsum(self.totals)[sample] - self.responses[sample] + position)
        sampled_ids = torch.cat(list(self.batch["unconcat_tokens"])).to(self.device)[where]
        sources, head_ids, head_log_q, supports = map(self._column, _ENTRIES)
        versions = [None if source is None else source.weight_versions for source in sources]
        version = _take(versions, sample, position, np.empty(0, np.int32))
        lag = np.where(version >= 0, float(miles.trainer_version()) - version, np.nan)
        sets: tuple[np.ndarray, ...] = ()
        if run.algo.support:
            sets = _take_supports(supports, sample, position)
        elif run.head:
            empty = np.empty((0, run.algo.head), np.int32)
            sets = _take(head_ids, sample, position, empty), _take(head_log_q, sample, position, empty.astype("f4"))
        return Tokens(
            micro=self,
            rows=torch.from_numpy(local.rows[active]),
            place=place,
            sample=sample,
            position=position,
            sampled_ids=sampled_ids,
            advantages=advantages,
            log_q=log_q,
            reference=reference[0] if reference else None,
            sets=tuple(map(self._to_device, sets)) or empty_head(sampled_ids, log_q),
            lag=self._to_device(lag.astype(np.float32)),
            rule=run.rule(self.pools, sample, self.device),
        )

    def agree(self, rejected: set[int]) -> set[int]:
        """The union over the context-parallel ranks, which see different tokens of the same samples."""
        if self.cp.size == 1:
            return rejected
        flags = torch.zeros(len(self.pools), dtype=torch.int32, device=self.device)
        flags[list(rejected)] = 1
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.cp.group)
        return set(flags.nonzero()[:, 0].tolist())

    def groups(self) -> dict[str, list[bool]]:
        """The metrics' groups: which samples belong to each."""
        view_of = self.run.view_of
        views = [view_of.get(pool) for pool in self.pools]
        members = {"all": [True] * len(self.pools)}
        members |= {f"pool/{name}": [pool == name for pool in self.pools] for name in view_of}
        return members | {f"view/{name}": [view == name for view in views] for name in view_of.values()}

    def rejections(self, rejected: set[int]) -> dict[str, Tensor]:
        """Rejected samples by group. Every rank of the context-parallel group knows of them; the first one reports."""
        bad = torch.tensor([float(i in rejected) for i in range(len(self.pools))])
        reports = self.cp.rank == 0
        groups = {name: torch.tensor(member) & reports for name, member in self.groups().items()}
        return metrics.sums({"rejected": metrics.Pair(bad)}, groups)

    def _column(self, key: str) -> Sequence[Any]:
        values = self.batch.get(key)
        return [None] * len(self.pools) if values is None else values

    def _joined(self, key: str, lengths: np.ndarray) -> Tensor:
        """Miles' entry `key`, whose samples must have these lengths, end to end. Raises ContractError."""
        values = list(self.batch[key])
        found = [value.numel() for value in values]
        if found != lengths.tolist():
            i = next(i for i, (a, b) in enumerate(zip(found, lengths, strict=True)) if a != b)
            raise ContractError(
                f"sample {i} of pool {self.pools[i]}: {key} has {found[i]} values for {lengths[i]} response tokens; "
                "the generate hook must return one per token"
            )
        return torch.cat(values)

    def _to_scored(self, values: Tensor) -> Tensor:
        """Rows of the reduced tokens as rows of the scored ones."""
        return values if self.scored is self.reduced else self._exchange(values, self.reduced, self.scored)

    def _to_reduced(self, values: Tensor) -> Tensor:
        return values if self.scored is self.reduced else self._exchange(values, self.scored, self.reduced)

    def _exchange(self, values: Tensor, held: LocalTokens, wanted: LocalTokens) -> Tensor:
        """Rows of `held` tokens, over the context-parallel ranks, as rows of `wanted` ones; differentiable."""
        full = values.new_zeros(int(self.responses.sum()), *values.shape[1:])
        full = full.index_put((self._to_device(self._index(held)),), values)
        return _SumOverRanks.apply(full, self.cp.group)[self._to_device(self._index(wanted))]

    def _index(self, tokens: LocalTokens) -> np.ndarray:
        """Places of `tokens` in the responses, laid end to end."""
        return (np.cumsum(self.responses) - self.responses)[tokens.sample] + tokens.position

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)


@dataclass(frozen=True)
class Tokens:
    """The active response tokens of a rank, [T] each; what needs no device stays on the host."""

    micro: MicroBatch
    rows: Tensor  # of the flattened logits, on the host
    place: Tensor  # among the rank's scored tokens
    sample: np.ndarray
    position: np.ndarray
    sampled_ids: Tensor
    advantages: Tensor
    log_q: Tensor
    reference: Tensor | None
    sets: tuple[Tensor, ...]  # (head ids, head log q) or (support offsets, ids, log q)
    lag: Tensor
    rule: Rule

    def inspect(self) -> set[int]:
        """Samples to reject for what their tokens hold. Raises ContractError."""
        if not self.sample.size:
            return set()
        algo = self.micro.run.algo
        own = self.sampled_ids, self.log_q, self.advantages, self.micro.shard.size
        if algo.support:
            offsets, ids, log_q = self.sets
            findings = contracts.check_support(offsets, ids, log_q, *own)
        else:
            head_ids, head_log_q = self.sets
            findings = contracts.check_head(head_ids, head_log_q, *own)
        return contracts.judge(findings, self.sample, self.position, self.micro.pools, algo.contracts)

    def estimate(self, logits: Tensor) -> Estimate:
        """The estimator on these tokens; also joins `logits` to the graph where there are none."""
        algo = self.micro.run.algo
        how = self.advantages, self.rule, algo.score_centering
        if algo.support:
            offsets, ids, log_q = self.sets
            log_p = score_support(
                logits, offsets, ids, shard=self.micro.shard, rows=self.rows, temperature=algo.temperature
            )
            return on_support(log_p, offsets, ids, log_q, self.sampled_ids, *how)
        head_ids, head_log_q = self.sets
        scores = self._score(logits, head_ids, entropy=True)
        return on_head(scores, head_ids, head_log_q, self.sampled_ids, self.log_q, *how)

    def reference_kl(self, logits: Tensor) -> Tensor:
        """k3 of KL(trainer || reference) [T] over the whole vocabulary, whatever the sampler kept."""
        assert self.reference is not None
        head_ids, _ = empty_head(self.sampled_ids, self.log_q)
        return metrics.k3(self.reference - self._score(logits, head_ids, entropy=False).sampled)

    def _score(self, logits: Tensor, head_ids: Tensor, entropy: bool) -> HeadScores:
        run = self.micro.run
        return score_head(
            logits,
            self.sampled_ids,
            head_ids,
            shard=self.micro.shard,
            rows=self.rows,
            temperature=run.algo.temperature,
            entropy=entropy,
            chunk_rows=run.chunk_rows,
        )

    def spread(self, values: Tensor) -> Tensor:
        """`values` [T] laid out as Miles' reducer wants them, zero elsewhere, joined to the graph in any case."""
        micro = self.micro
        return micro._to_reduced(values.new_zeros(micro.scored.rows.size).index_put((self.place,), values))

    def groups(self) -> dict[str, Tensor]:
        """[T] bool for each of the metrics' groups."""
        groups = self.micro.groups()
        table = torch.tensor(list(groups.values()))[:, torch.from_numpy(self.sample)]
        return dict(zip(groups, table.to(self.place.device), strict=True))


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduced gradient: each rank's loss sees a part of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None


def _take(arrays: Sequence[Any], sample: np.ndarray, position: np.ndarray, empty: np.ndarray) -> np.ndarray:
    """Row `position` of its sample's array for each token; tokens are sorted by sample, `empty` has rows' shape."""
    return np.concatenate([empty, *(arrays[i][position[sample == i]] for i in np.unique(sample))])


def _take_supports(supports: Sequence[Any], sample: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, ...]:
    """Offsets, ids and log q of the tokens' supports."""
    counts, ids, log_q = [np.zeros(1, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0, np.float32)]
    for i in np.unique(sample):
        support, rows = supports[i], position[sample == i]
        count = np.diff(support.offsets)[rows]
        taken = np.repeat(support.offsets[rows] - np.cumsum(count) + count, count) + np.arange(count.sum())
        counts.append(count)
        ids.append(support.ids[taken])
        log_q.append(support.log_probs[taken])
    return np.cumsum(np.concatenate(counts)), np.concatenate(ids), np.concatenate(log_q)
