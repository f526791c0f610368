"""The doctor against engines with a known distribution and known faults."""

import asyncio
import base64
import dataclasses
import json
import math
import random
from collections.abc import Sequence
from datetime import date, datetime, timedelta, timezone
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles_mixprec import doctor
from miles_mixprec.config import Config, Pool, load
from miles_mixprec.errors import ConfigError
from miles_mixprec.fleet.accelerators import PRICES_AS_OF

VOCABULARY = 300
RUN = ["run_dir=r", "run_id=a", "updates=1", "prompts_per_update=1", "fleet.model=m"]


def log_probs(context: Sequence[int], temperature: float, noise: float) -> list[float]:
    """A distribution that depends on the last token alone; `noise` is added to the logits, differently per token."""
    rng, wobble = random.Random(context[-1]), random.Random(7000 + context[-1])
    logits = [(rng.gauss(0, 2) + noise * wobble.gauss(0, 1)) / temperature for _ in range(VOCABULARY)]
    norm = math.log(sum(map(math.exp, logits)))
    return [logit - norm for logit in logits]


@dataclasses.dataclass
class Engine:
    """What can be wrong with it: noise in the logits, log-probs at temperature 1, missing fields, a slow clock.

    It answers only those who bring its token, if it has one.
    """

    noise: float = 0.0
    original: bool = False
    without: tuple[str, ...] = ()
    skew_s: int = 0
    token: str | None = None
    headers: dict[str, str] = dataclasses.field(default_factory=dict)

    async def generate(self, request: web.Request) -> web.Response:
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized
        body = await request.json()
        sampling, prompt = body["sampling_params"], list(body["input_ids"])
        text, rows = list(prompt), []
        rng = random.Random(len(prompt))
        for _ in range(sampling["max_new_tokens"]):
            sampled_at = log_probs(text, sampling["temperature"], self.noise)
            token = rng.choices(range(VOCABULARY), [math.exp(p) for p in sampled_at])[0]
            reported = log_probs(text, 1.0, self.noise) if self.original else sampled_at
            rows.append((token, reported))
            text.append(token)
        meta: dict[str, Any] = {
            "weight_version": "0",
            "weight_versions": [],
            "output_token_logprobs": [[row[token], token, None] for token, row in rows],
        }
        if count := body.get("top_logprobs_num"):
            heads = [sorted(range(VOCABULARY), key=row.__getitem__)[-count:] for _, row in rows]
            scores = [[row[token] for token in head] for head, (_, row) in zip(heads, rows, strict=True)]
            if body.get("return_flat_raw_output_top_logprobs"):
                meta |= {
                    "output_top_logprobs_val_flat_b64": base64.b64encode(np.array(scores, "<f4").tobytes()).decode(),
                    "output_top_logprobs_idx_flat_b64": base64.b64encode(np.array(heads, "<i4").tobytes()).decode(),
                    "output_top_logprobs_shape": [len(heads), count],
                }
            else:
                meta["output_top_logprobs"] = [
                    [[score, token, None] for score, token in zip(*pair, strict=True)]
                    for pair in zip(scores, heads, strict=True)
                ]
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[token] for token, _ in rows]
            meta["output_token_sampling_logprobs"] = [[0.0] for _ in rows]
        if (start := body.get("logprob_start_len")) is not None:
            scores = [log_probs(prompt[:i], 1.0, self.noise)[prompt[i]] for i in range(max(start, 1), len(prompt))]
            meta["input_token_logprobs"] = [[None, 0, None]] + [[score, 0, None] for score in scores]
        meta = {key: value for key, value in meta.items() if key not in self.without}
        return web.json_response({"output_ids": text[len(prompt) :], "meta_info": meta}, headers=self.headers)

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23", "attention_backend": "fa3", "kv_cache_dtype": "fp8_e4m3"})

    async def health(self, request: web.Request) -> web.Response:
        stated = datetime.now(timezone.utc) + timedelta(seconds=self.skew_s)
        return web.Response(headers={"Date": format_datetime(stated, usegmt=True)})

    async def start(self) -> TestServer:
        app = web.Application()
        routes = (
            web.post("/generate", self.generate),
            web.get("/server_info", self.info),
            web.get("/health", self.health),
        )
        app.add_routes(routes)
        server = TestServer(app)
        await server.start_server()
        return server


def config(tmp_path: Path, *overrides: str) -> Config:
    made = load("config", [*RUN, f"weights.store={tmp_path}/store", *overrides])
    made.fleet.pools = {
        "bf16": Pool(view="bf16", slots_per_engine=1),
        "fp8": Pool(view="fp8", slots_per_engine=1, execution="dequantized"),
    }
    return made


def diagnose(
    made: Config, engines: dict[str, Engine], router: Engine | None = None, **options: Any
) -> doctor.Diagnosis:
    async def run() -> doctor.Diagnosis:
        servers = {name: await engine.start() for name, engine in engines.items()}
        front = await router.start() if router else None
        urls = {name: str(server.make_url("")) for name, server in servers.items()}
        try:
            return await doctor.diagnose(
                made,
                urls,
                router_url=str(front.make_url("")) if front else None,
                token_range=(0, VOCABULARY),
                today=PRICES_AS_OF,
                **options,
            )
        finally:
            for server in [*servers.values(), *([front] if front else [])]:
                await server.close()

    return asyncio.run(run())


def found(diagnosis: doctor.Diagnosis, subject: str, name: str) -> doctor.Check:
    (check,) = [check for check in diagnosis.checks if (check.subject, check.name) == (subject, name)]
    return check


def test_a_healthy_target(tmp_path: Path) -> None:
    diagnosis = diagnose(config(tmp_path), {"bf16/0": Engine(), "fp8/0": Engine()})
    bad = [check for check in diagnosis.checks if check.status != "ok" and check.subject != "miles"]
    assert bad == []
    assert [row.engine for row in diagnosis.parity] == ["bf16/0", "fp8/0"]
    assert all(row.max_abs < 1e-6 and row.tokens == 8 * 64 for row in diagnosis.parity)
    assert (diagnosis.parity[1].attention, diagnosis.parity[1].execution) == ("fa3", "dequantized")
    json.dumps(diagnosis.as_dict())
    assert list((tmp_path / "store").iterdir()) == []


def test_parity_measures_the_kl_between_pools(tmp_path: Path) -> None:
    noise = 0.5
    diagnosis = diagnose(config(tmp_path), {"bf16/0": Engine(), "fp8/0": Engine(noise=noise)}, max_kl=0.02)
    exact = []
    for token in range(VOCABULARY):
        p, q = log_probs([token], 1.0, 0.0), log_probs([token], 1.0, noise)
        exact.append(sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)))
    mean = sum(exact) / len(exact)
    row = diagnosis.parity[1]
    assert row.kl == pytest.approx(mean, rel=0.35)
    assert found(diagnosis, "fp8/0", "log-prob parity").status == "failed"
    assert found(diagnosis, "bf16/0", "log-prob parity").status == "ok"
    assert diagnosis.failed


def test_another_reference(tmp_path: Path) -> None:
    diagnosis = diagnose(config(tmp_path), {"bf16/0": Engine(), "fp8/0": Engine(noise=0.5)}, reference="fp8")
    assert diagnosis.parity[1].kl < 1e-9 < diagnosis.parity[0].kl
    lost = diagnose(config(tmp_path), {"bf16/0": Engine()}, reference="nope")
    assert "no engine to compare with" in found(lost, "nope", "parity").detail


@pytest.mark.parametrize(
    ("engine", "name", "message"),
    [
        (Engine(original=True), "log-prob temperature", "set SGLANG_RETURN_ORIGINAL_LOGPROB=0"),
        (Engine(without=("weight_version",)), "weight version", "replies state no weight_version"),
        (Engine(without=("output_token_sampling_mask",)), "recorded data", "no meta_info.output_token_sampling_mask"),
        (Engine(skew_s=-60), "clock", "s against this machine; run NTP"),
    ],
)
def test_faults(tmp_path: Path, engine: Engine, name: str, message: str) -> None:
    check = found(diagnose(config(tmp_path), {"bf16/0": engine}), "bf16/0", name)
    assert check.status == "failed"
    assert message in check.detail


def test_missing_spans_are_a_warning(tmp_path: Path) -> None:
    diagnosis = diagnose(config(tmp_path), {"bf16/0": Engine(without=("weight_versions",))})
    assert found(diagnosis, "bf16/0", "weight version").status == "warning"


@pytest.mark.parametrize(
    ("arm", "data"),
    [("grpo", "the sampled token's log-prob"), ("sc_mis", "a head of 128"), ("grpo_top_p", "the support")],
)
def test_what_the_arm_records_is_read_as_the_rollout_reads_it(tmp_path: Path, arm: str, data: str) -> None:
    diagnosis = diagnose(config(tmp_path, f"algo={arm}"), {"bf16/0": Engine()})
    assert found(diagnosis, "bf16/0", "recorded data").detail == f"{data} of every token"


def test_unreachable_engine_does_not_hide_the_others(tmp_path: Path) -> None:
    async def run() -> doctor.Diagnosis:
        server = await Engine().start()
        urls = {"bf16/0": str(server.make_url("")), "fp8/0": "http://127.0.0.1:1"}
        try:
            return await doctor.diagnose(config(tmp_path), urls, token_range=(0, VOCABULARY), today=PRICES_AS_OF)
        finally:
            await server.close()

    diagnosis = asyncio.run(run())
    assert found(diagnosis, "fp8/0", "reachable").status == "failed"
    assert found(diagnosis, "bf16/0", "log-prob parity").status == "ok"


def test_an_engine_that_answers_something_else_fails_its_check(tmp_path: Path) -> None:
    async def nothing(request: web.Request) -> web.Response:
        return web.json_response(None)

    async def run() -> doctor.Diagnosis:
        app = web.Application()
        app.add_routes([web.get("/server_info", nothing)])
        async with TestServer(app) as server:
            urls = {"bf16/0": str(server.make_url(""))}
            return await doctor.diagnose(config(tmp_path), urls, token_range=(0, VOCABULARY), today=PRICES_AS_OF)

    assert found(asyncio.run(run()), "bf16/0", "reachable").status == "failed"


def test_an_engine_of_a_pool_that_the_fleet_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine foo/0: fleet .* has no such pool; name one of bf16"):
        asyncio.run(doctor.diagnose(config(tmp_path), {"foo/0": "http://127.0.0.1:1"}))


def test_router_must_pass_everything_on(tmp_path: Path) -> None:
    named = {"X-Mixprec-Pool": "bf16", "X-Mixprec-Engine": "bf16/0", "X-Mixprec-View": "bf16"}
    good = diagnose(config(tmp_path), {"bf16/0": Engine()}, Engine(headers=named))
    assert found(good, "router", "pass-through").detail == "all fields, from bf16/0"
    lossy = diagnose(config(tmp_path), {"bf16/0": Engine()}, Engine(without=("output_token_sampling_mask",)))
    check = found(lossy, "router", "pass-through")
    assert check.status == "failed"
    assert "no meta_info.output_token_sampling_mask" in check.detail
    assert "lost X-Mixprec-Pool, X-Mixprec-Engine, X-Mixprec-View; use the router" in check.detail


def test_the_router_is_asked_with_the_clients_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCTOR_TEST_TOKEN", "secret")
    named = {"X-Mixprec-Pool": "bf16", "X-Mixprec-Engine": "bf16/0", "X-Mixprec-View": "bf16"}
    made = config(tmp_path, "router.client_token_env=DOCTOR_TEST_TOKEN")
    found_there = diagnose(made, {"bf16/0": Engine()}, Engine(headers=named, token="secret"))
    assert found(found_there, "router", "pass-through").status == "ok"


def test_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = doctor.check_store(f"{tmp_path}/file/store")
    assert check.status == "failed" and "correct weights.store" in check.detail
    assert doctor.check_store("nosuch://bucket/store").status == "failed"
    assert doctor.check_store("memory://store").status == "ok"


def test_old_prices_warn(tmp_path: Path) -> None:
    made = load(
        "config", [*RUN, f"weights.store={tmp_path}", "fleet=planned", "fleet.pools.b300_nvfp4.hourly_price=6"]
    )
    fresh = list(doctor.check_prices(made, PRICES_AS_OF))
    old = list(doctor.check_prices(made, PRICES_AS_OF + timedelta(days=91)))
    assert [check.status for check in fresh] == ["ok"]
    assert [check.status for check in old] == ["warning"]
    assert old[0].detail.endswith("(91 days old) for h200_fp8; set hourly_price for current ones")
    assert list(doctor.check_prices(config(tmp_path), date(2040, 1, 1))) == [], "CPU pools have no list price"
