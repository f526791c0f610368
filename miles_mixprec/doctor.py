"""Checks of a target before a run: Miles, the engines over HTTP, agreement of the pools, store, clocks, prices.

Log-prob parity: the reference pool samples continuations at temperature 1; every engine then scores the same tokens.
With d = log p_engine - log p_sampler over sampled tokens, E[exp(d) - 1 - d] >= 0 estimates KL(sampler || engine)
(estimator k3 of http://joschu.net/blog/kl-approx.html). The reference scores its own tokens too, which shows what
prefill and decode kernels alone differ by.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date, datetime, timezone
from email.utils import parsedate_to_datetime
from statistics import fmean
from typing import Any, Literal

import aiohttp
import fsspec

from miles_mixprec import miles
from miles_mixprec.config import Algo, Config
from miles_mixprec.errors import ConfigError, EngineError, MixprecError
from miles_mixprec.fleet.accelerators import PRICES_AS_OF
from miles_mixprec.fleet.compatibility import check as compatibility
from miles_mixprec.headers import ENGINE, POOL, SESSION, VIEW, authorization
from miles_mixprec.rollout.capture import read_reply, request_body

Status = Literal["ok", "warning", "failed"]
MAX_SKEW_S, DATE_RESOLUTION_S = 2.0, 2.0
MAX_PRICE_AGE_DAYS = 90
PROMPTS, PROMPT_TOKENS, SAMPLED_TOKENS, CANDIDATES = 8, 32, 64, 8
# What reading an engine that is gone, hangs, or answers something else raises.
UNREADABLE = (aiohttp.ClientError, asyncio.TimeoutError, LookupError, TypeError, ValueError, ZeroDivisionError)


@dataclass(frozen=True)
class Check:
    subject: str  # miles, store, prices, a pool, or an engine
    name: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Parity:
    """Agreement of one engine with the reference pool's own log-probs, in nats, over `tokens` sampled tokens."""

    engine: str
    accelerator: str
    attention: str
    moe: str
    kv_cache: str
    view: str
    execution: str
    tokens: int
    kl: float
    mean_abs: float
    p99_abs: float
    max_abs: float


@dataclass(frozen=True)
class Diagnosis:
    checks: list[Check]
    parity: list[Parity]

    @property
    def failed(self) -> bool:
        return any(check.status == "failed" for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {"failed": self.failed} | asdict(self)


async def diagnose(
    config: Config,
    engines: Mapping[str, str],
    *,
    router_url: str | None = None,
    reference: str | None = None,
    max_kl: float = 0.05,
    token_range: tuple[int, int] = (1000, 20000),
    today: date | None = None,
) -> Diagnosis:
    """Run every check. `engines` maps `<pool>/<index>` to URLs; `reference` is a pool (default: the first one's).

    A pool whose KL against the reference exceeds `max_kl` fails. Prompts are random tokens of `token_range`. Raises
    ConfigError for an engine of a pool that the fleet lacks.
    """
    for name in engines:
        if name.split("/")[0] not in config.fleet.pools:
            pools = ", ".join(config.fleet.pools)
            raise ConfigError(f"engine {name}: fleet {config.fleet.name} has no such pool; name one of {pools}")
    checks = [check_miles(), check_store(config.weights.store), *check_prices(config, today or date.today())]
    checks += [Check(found.pool, "compatibility", "warning", found.message) for found in compatibility(config.fleet)]
    rng = random.Random(0)
    prompts = [rng.choices(range(*token_range), k=PROMPT_TOKENS) for _ in range(PROMPTS)]
    parity: list[Parity] = []
    described: dict[str, dict[str, Any]] = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as http:
        for name, url in engines.items():
            with _failing(checks, name, "reachable"):
                async with http.get(f"{url}/server_info", raise_for_status=True) as reply:
                    described[name] = dict(await reply.json())
                version = described[name].get("version", "of unknown version")
                checks.append(Check(name, "reachable", "ok", f"SGLang {version}"))
                checks += await check_engine(http, name, url, config.algo, prompts[0])
        if router_url is not None:
            with _failing(checks, "router", "reachable"):
                checks.append(await check_router(http, router_url, config, prompts[0]))
        if described:
            wanted = reference or next(iter(described)).split("/")[0]
            reachable = {name: engines[name] for name in described}
            with _failing(checks, wanted, "parity"):
                parity = await compare(http, config, reachable, described, wanted, prompts)
    for row in parity:
        status: Status = "ok" if row.kl <= max_kl else "failed"
        sizes = f"mean |d| {row.mean_abs:.1e}, p99 {row.p99_abs:.1e}, max {row.max_abs:.1e}"
        checks.append(Check(row.engine, "log-prob parity", status, f"KL {row.kl:.2e} to the reference, {sizes}"))
    return Diagnosis(checks, parity)


def check_miles() -> Check:
    """The importable Miles and which of its features it brings itself."""
    try:
        found = miles.features()
    except MixprecError as error:
        return Check("miles", "version", "failed", str(error))
    detail = f"{found.generation} at {found.location}; has {', '.join(found.offers) or 'none'}"
    return Check("miles", "version", "ok", detail)


def check_store(root: str) -> Check:
    """Write, read back and delete a file in the weight store."""
    data, name = os.urandom(1 << 20), f".doctor-{uuid.uuid4().hex}"
    started = time.monotonic()
    try:
        fs, path = fsspec.core.url_to_fs(root)
        fs.makedirs(path, exist_ok=True)
        fs.pipe_file(f"{path}/{name}", data)
        same = fs.cat_file(f"{path}/{name}") == data
        fs.rm_file(f"{path}/{name}")
    except (OSError, ImportError, ValueError) as error:
        return Check("store", "write and read", "failed", f"{root}: {error}; correct weights.store or its permissions")
    detail = f"{root}: 1 MiB there and back in {time.monotonic() - started:.2f} s"
    if not same:
        detail = f"{root}: what is read back differs from what was written; correct weights.store"
    return Check("store", "write and read", "ok" if same else "failed", detail)


def check_prices(config: Config, today: date) -> Iterator[Check]:
    """Whether some pool relies on list prices that are old."""
    pools = config.fleet.pools.items()
    listed = [name for name, pool in pools if pool.hourly_price is None and pool.accelerator != "cpu"]
    age = (today - PRICES_AS_OF).days
    found = f"list prices of {PRICES_AS_OF} ({age} days old) for {', '.join(listed)}"
    if listed and age > MAX_PRICE_AGE_DAYS:
        yield Check("prices", "age", "warning", f"{found}; set hourly_price for current ones")
    elif listed:
        yield Check("prices", "age", "ok", found)


async def check_engine(
    http: aiohttp.ClientSession, name: str, url: str, algo: Algo, prompt: Sequence[int]
) -> list[Check]:
    """Version, temperature of the log-probs, clock, and the data that the arm records, of one engine."""
    hot, cold = [
        (await _post(http, url, _request(prompt, 1, temperature=t) | {"top_logprobs_num": CANDIDATES}))[0]["meta_info"]
        for t in (1.0, 0.5)
    ]
    recorded, _ = await _turn(http, name, url, algo, prompt)
    return [_version(name, hot), _scaled(name, hot, cold), await _clock(http, name, url), recorded]


async def check_router(http: aiohttp.ClientSession, url: str, config: Config, prompt: Sequence[int]) -> Check:
    """Whether the router passes on what the rollout needs, and says where a turn ran."""
    headers = {SESSION: f"doctor-{uuid.uuid4().hex}", **authorization(config.router)}
    recorded, source = await _turn(http, "router", url, config.algo, prompt, headers)
    wrong = [recorded.detail] if recorded.status == "failed" else []
    if lost := [key for key in (POOL, ENGINE, VIEW) if key not in source]:
        wrong.append(f"lost {', '.join(lost)}")
    if wrong:
        return Check("router", "pass-through", "failed", f"{'; '.join(wrong)}; use the router of this package")
    return Check("router", "pass-through", "ok", f"all fields, from {source[ENGINE]}")


async def _turn(
    http: aiohttp.ClientSession,
    subject: str,
    url: str,
    algo: Algo,
    prompt: Sequence[int],
    headers: Mapping[str, str] | None = None,
) -> tuple[Check, Mapping[str, str]]:
    """A turn as the rollout asks for it, read as the rollout reads it; and the reply's headers."""
    body = request_body(algo, prompt, {"max_new_tokens": 4, "ignore_eos": True})
    answer, source = await _post(http, url, body, headers)
    try:
        read_reply(algo, answer, pool=subject)
    except MixprecError as error:
        return Check(subject, "recorded data", "failed", str(error)), source
    what = "the support" if algo.support else f"a head of {algo.head}" if algo.head else "the sampled token's log-prob"
    return Check(subject, "recorded data", "ok", f"{what} of every token"), source


async def compare(
    http: aiohttp.ClientSession,
    config: Config,
    engines: Mapping[str, str],
    described: Mapping[str, Mapping[str, Any]],
    reference: str,
    prompts: Sequence[Sequence[int]],
) -> list[Parity]:
    """Log-prob parity of every engine with the first engine of pool `reference`."""
    chosen = next((name for name in engines if name.split("/")[0] == reference), None)
    if chosen is None:
        raise EngineError(f"pool {reference}: no engine to compare with; name one of the pools that have engines")
    replies = await asyncio.gather(
        *(_post(http, engines[chosen], _request(prompt, SAMPLED_TOKENS, temperature=1.0)) for prompt in prompts)
    )
    sampled = [[entry[0] for entry in reply["meta_info"]["output_token_logprobs"]] for reply, _ in replies]
    texts = [[*prompt, *reply["output_ids"]] for prompt, (reply, _) in zip(prompts, replies, strict=True)]
    rows = []
    for name, url in engines.items():
        scores = await asyncio.gather(*(_score(http, url, text, PROMPT_TOKENS) for text in texts))
        differences = [
            a - b for mine, theirs in zip(scores, sampled, strict=True) for a, b in zip(mine, theirs, strict=True)
        ]
        sizes = sorted(map(abs, differences))
        pool, info = config.fleet.pools[name.split("/")[0]], described[name]
        rows.append(
            Parity(
                engine=name,
                accelerator=pool.accelerator,
                attention=str(info.get("attention_backend")),
                moe=str(info.get("moe_runner_backend")),
                kv_cache=str(info.get("kv_cache_dtype")),
                view=pool.view,
                execution=pool.execution,
                tokens=len(differences),
                kl=fmean(math.expm1(d) - d for d in differences),
                mean_abs=fmean(sizes),
                p99_abs=sizes[int(0.99 * len(sizes))],
                max_abs=sizes[-1],
            )
        )
    return rows


def _version(name: str, meta: Mapping[str, Any]) -> Check:
    if "weight_version" not in meta:
        return Check(name, "weight version", "failed", "replies state no weight_version; use SGLang 0.5.10 or newer")
    if "weight_versions" not in meta:
        detail = f"{meta['weight_version']}; no spans by token, so turns across an update count for one version"
        return Check(name, "weight version", "warning", detail)
    return Check(name, "weight version", "ok", f"{meta['weight_version']}, with spans by token")


def _scaled(name: str, hot: Mapping[str, Any], cold: Mapping[str, Any]) -> Check:
    """Gaps between candidates double at half the temperature if log-probs are those of the sampling temperature."""
    at = [{entry[1]: entry[0] for entry in meta["output_top_logprobs"][0]} for meta in (hot, cold)]
    shared = sorted(set(at[0]) & set(at[1]), key=lambda token: at[0][token])
    ratio = (at[1][shared[-1]] - at[1][shared[0]]) / (at[0][shared[-1]] - at[0][shared[0]])
    if abs(ratio - 2) > 0.1:
        detail = f"log-probs do not follow the temperature (gap ratio {ratio:.2f})"
        return Check(name, "log-prob temperature", "failed", f"{detail}; set SGLANG_RETURN_ORIGINAL_LOGPROB=0")
    return Check(name, "log-prob temperature", "ok", "log-probs are those of the sampling temperature")


async def _clock(http: aiohttp.ClientSession, name: str, url: str) -> Check:
    before = datetime.now(timezone.utc)
    async with http.get(f"{url}/health") as reply:
        stated = reply.headers.get("Date")
    if stated is None:
        return Check(name, "clock", "warning", "states no Date")
    # The server's own time lies between the date and what rounding and uvicorn's cached header hide.
    earliest = parsedate_to_datetime(stated)
    ahead = (earliest - datetime.now(timezone.utc)).total_seconds()
    behind = (before - earliest).total_seconds() - DATE_RESOLUTION_S
    skew = max(ahead, 0.0) - max(behind, 0.0)
    if abs(skew) > MAX_SKEW_S:
        return Check(name, "clock", "failed", f"{skew:+.1f} s against this machine; run NTP")
    return Check(name, "clock", "ok", f"{skew:+.1f} s against this machine")


def _request(prompt: Sequence[int], tokens: int, *, temperature: float) -> dict[str, Any]:
    sampling = {"temperature": temperature, "max_new_tokens": tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True}


async def _score(http: aiohttp.ClientSession, url: str, text: Sequence[int], start: int) -> list[float]:
    """Log-probs that the engine gives to text[start:]."""
    body = _request(text, 1, temperature=1.0) | {"logprob_start_len": start - 1}
    meta = (await _post(http, url, body))[0]["meta_info"]
    return [entry[0] for entry in meta["input_token_logprobs"][-(len(text) - start) :]]


async def _post(
    http: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], Mapping[str, str]]:
    async with http.post(f"{url}/generate", json=body, headers=headers) as reply:
        if reply.status != 200:
            raise EngineError(f"{url}/generate answers {reply.status}: {(await reply.text())[:200]}")
        return dict(await reply.json()), reply.headers


@contextmanager
def _failing(checks: list[Check], subject: str, name: str) -> Iterator[None]:
    """Whatever an engine answers wrongly becomes a failed check, so that the others still run."""
    try:
        yield
    except (EngineError, *UNREADABLE) as error:
        checks.append(Check(subject, name, "failed", f"{type(error).__name__}: {error}"))
