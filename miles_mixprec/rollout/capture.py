"""SGLang replies as arrays: what the sampler knew at every token, collected over the turns of one trajectory.

Asked of `/generate` (SGLang 0.5.23 and later): without top-p the `head` most likely tokens come as two base64 arrays;
with top-p/top-k the whole kept support comes with its post-filter log-probs. The sampled token's log-prob is read
from its own row where it appears there, so that every later comparison of the two sees one number.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles_mixprec.config import Algo
from miles_mixprec.errors import CapabilityError, ConfigError, ContractError
from miles_mixprec.rollout.record import SamplerRecord, Support

# Everything that changes the sampled distribution besides temperature, top-p and top-k, at its neutral value. Every
# request states it, so that a model's generation_config.json cannot put another value in.
NEUTRAL = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
REFUSED = ("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "custom_params", "custom_logit_processor")


def request_body(algo: Algo, input_ids: Sequence[int], sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The `/generate` body for one turn, sampling exactly as `algo` says and asking for what its estimator needs.

    Raises ConfigError if `sampling_params` (Miles' flags) contradict `algo` or constrain sampling.
    """
    for key, wanted in (("temperature", algo.temperature), ("top_p", algo.top_p), ("top_k", algo.top_k)):
        if sampling_params.get(key, wanted) != wanted:
            raise ConfigError(
                f"--rollout-{key.replace('_', '-')} {sampling_params[key]} differs from algo.{key}={wanted}; "
                "sampler and trainer must use one value"
            )
    for key in REFUSED:
        if sampling_params.get(key):
            raise ConfigError(
                f"sampling parameter {key}: constrained sampling has no replayable distribution; remove it"
            )
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": {
            **sampling_params,
            **NEUTRAL,
            "temperature": algo.temperature,
            "top_p": algo.top_p,
            "top_k": algo.top_k,
        },
        "return_logprob": True,
    }
    if algo.support:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    elif algo.head:
        body |= {
            "top_logprobs_num": algo.head,
            "return_flat_raw_output_top_logprobs": True,
            "return_flat_raw_top_logprobs_b64": True,
        }
    return body


@dataclass(frozen=True)
class Reply:
    """One turn's generated tokens.

    ids: int32 [n]. log_probs: float32 [n], of the sampled tokens under the distribution that they were drawn from.
    versions: int32 [n]. topk_token_ids, topk_log_probs: [n, k] or None. support: n rows or None.
    """

    ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    topk_token_ids: np.ndarray | None = None
    topk_log_probs: np.ndarray | None = None
    support: Support | None = None


def read_reply(algo: Algo, body: Mapping[str, Any], *, pool: str) -> Reply:
    """Arrays of a `/generate` reply.

    Raises CapabilityError if the engine left out what was asked for, ContractError if the parts contradict each other.
    """
    meta = body["meta_info"]
    sampled = _required(meta, "output_token_logprobs", pool)
    ids = np.array([entry[1] for entry in sampled], dtype=np.int32)
    log_probs = np.array([entry[0] for entry in sampled], dtype=np.float32)
    if list(body.get("output_ids", ids)) != ids.tolist():
        raise ContractError(
            f"pool {pool}: output_ids and output_token_logprobs name different tokens; drop the sample"
        )
    versions = _versions(meta, len(ids), pool)
    finish = str((meta.get("finish_reason") or {}).get("type"))
    if algo.support:
        support = _read_support(meta, len(ids), pool)
        log_probs = _of_sampled(ids, support, pool)
        return Reply(ids, log_probs, versions, finish, support=support)
    if algo.head:
        head_ids, head_log_probs = _read_head(meta, len(ids), algo.head, pool)
        inside = head_ids == ids[:, None]
        log_probs = np.where(inside.any(1), np.where(inside, head_log_probs, 0).sum(1), log_probs).astype(np.float32)
        return Reply(ids, log_probs, versions, finish, head_ids, head_log_probs)
    return Reply(ids, log_probs, versions, finish)


def _required(meta: Mapping[str, Any], key: str, pool: str) -> Any:
    if key not in meta:
        raise CapabilityError(
            f"pool {pool}: the engine's reply has no meta_info.{key}; serve this pool with SGLang 0.5.23 or later "
            "and route it through nothing that drops fields"
        )
    return meta[key]


def _versions(meta: Mapping[str, Any], count: int, pool: str) -> np.ndarray:
    """Weight version of each token: the engine's spans where a turn ran across an update, else its one version."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    versions = np.full(count, -1, dtype=np.int32)
    for span in spans:
        if not str(span["version"]).isdigit():
            raise ContractError(
                f"pool {pool}: weight version {span['version']!r} is no number; start engines with --weight-version 0"
            )
        versions[span["start"] : span["end"]] = int(span["version"])
    return versions


def _read_head(meta: Mapping[str, Any], rows: int, head: int, pool: str) -> tuple[np.ndarray, np.ndarray]:
    shape = (rows, head)
    values = _required(meta, "output_top_logprobs_val_flat_b64", pool)
    indices = _required(meta, "output_top_logprobs_idx_flat_b64", pool)
    told = tuple(meta["output_top_logprobs_shape"])
    if told != shape or meta.get("output_top_logprobs_null_prefix"):
        raise ContractError(f"pool {pool}: top log-probs have shape {told}, asked for {shape}; drop the sample")
    log_probs = np.frombuffer(base64.b64decode(values), dtype="<f4").reshape(shape)
    return np.frombuffer(base64.b64decode(indices), dtype="<i4").reshape(shape), log_probs


def _read_support(meta: Mapping[str, Any], rows: int, pool: str) -> Support:
    masks = _required(meta, "output_token_sampling_mask", pool)
    scores = _required(meta, "output_token_sampling_logprobs", pool)
    if len(masks) != rows or len(scores) != rows:
        raise ContractError(f"pool {pool}: {len(masks)} support rows for {rows} tokens; drop the sample")
    widths = np.array([len(row) for row in masks], dtype=np.int64)
    if widths.tolist() != [len(row) for row in scores]:
        raise ContractError(f"pool {pool}: a support row and its log-probs differ in length; drop the sample")
    return Support(
        offsets=_offsets(widths),
        ids=np.fromiter((i for row in masks for i in row), np.int32, int(widths.sum())),
        log_probs=np.fromiter((s for row in scores for s in row), np.float32, int(widths.sum())),
    )


def _of_sampled(ids: np.ndarray, support: Support, pool: str) -> np.ndarray:
    """Log-probs of the sampled tokens from their own support rows."""
    row = np.repeat(np.arange(len(ids)), np.diff(support.offsets))
    hits = support.ids == ids[row]
    found = np.bincount(row[hits], minlength=len(ids))
    if (found != 1).any():
        bad = int(np.flatnonzero(found != 1)[0])
        raise ContractError(
            f"pool {pool}: sampled token {ids[bad]} occurs {found[bad]} times in its support; its mask is not "
            "the one it sampled from, drop the sample and report the engine"
        )
    return support.log_probs[hits]


@dataclass
class Trajectory:
    """Collects the turns of one episode into aligned arrays."""

    algo: Algo
    pool: str
    view: str
    ids: list[int] = field(default_factory=list)  # response tokens, observations included
    loss_mask: list[int] = field(default_factory=list)
    turns: list[tuple[slice, str, Reply]] = field(default_factory=list)  # (place in the response, engine, reply)

    def add_reply(self, engine: str, reply: Reply, count: int | None = None) -> None:
        """Append the first `count` tokens of `reply`, by default all."""
        ids = reply.ids[:count].tolist()
        self.turns.append((slice(len(self.ids), len(self.ids) + len(ids)), engine, reply))
        self.ids += ids
        self.loss_mask += [1] * len(ids)

    def add_observation(self, ids: Sequence[int]) -> None:
        self.ids += list(ids)
        self.loss_mask += [0] * len(ids)

    def rows(self, name: str, fill: float, dtype: str, *tail: int) -> np.ndarray:
        """`[R, *tail]`: field `name` of every reply at its place, `fill` on observation rows."""
        out = np.full((len(self.ids), *tail), fill, dtype=dtype)
        for place, _, reply in self.turns:
            out[place] = getattr(reply, name)[: place.stop - place.start]
        return out

    def log_probs(self) -> np.ndarray:
        """float32 [R], 0 on observation tokens."""
        return self.rows("log_probs", 0.0, "float32")

    def record(self) -> SamplerRecord:
        algo = self.algo
        head = algo.head > 0 and not algo.support
        return SamplerRecord(
            pool=self.pool,
            view=self.view,
            engines=[engine for _, engine, _ in self.turns],
            turn_offsets=np.array([place.start for place, _, _ in self.turns] + [len(self.ids)], dtype=np.int32),
            weight_versions=self.rows("versions", -1, "int32"),
            topk_token_ids=self.rows("topk_token_ids", -1, "int32", algo.head) if head else None,
            topk_log_probs=self.rows("topk_log_probs", -np.inf, "float32", algo.head) if head else None,
            support=self._support() if algo.support else None,
            temperature=algo.temperature,
            top_p=algo.top_p,
            top_k=algo.top_k,
        )

    def _support(self) -> Support:
        widths = np.zeros(len(self.ids), dtype=np.int64)
        ids, log_probs = [np.empty(0, np.int32)], [np.empty(0, np.float32)]
        for place, _, reply in self.turns:
            assert reply.support is not None
            offsets = reply.support.offsets[: place.stop - place.start + 1]
            widths[place] = np.diff(offsets)
            ids.append(reply.support.ids[: offsets[-1]])
            log_probs.append(reply.support.log_probs[: offsets[-1]])
        return Support(_offsets(widths), np.concatenate(ids), np.concatenate(log_probs))


def _offsets(widths: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(widths)))
