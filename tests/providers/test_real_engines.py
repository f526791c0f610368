"""Real SGLang servers on the CPU: launched, measured, examined and stopped."""

import asyncio
import os
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from tiny_model import write_tiny_model

from miles_mixprec import doctor
from miles_mixprec.bench import Ramp, bench, synthetic_episodes
from miles_mixprec.config import Algo, Config, Fleet, Pool, Weights
from miles_mixprec.errors import ConfigError, EngineError
from miles_mixprec.providers.base import await_engines
from miles_mixprec.providers.local import LocalProvider

pytestmark = pytest.mark.engines
ROOT = Path(__file__).parents[2]
SGLANG = Path(os.environ.get("SGLANG_0523", ROOT / ".venv" / "sglang-0.5.23"))
ENV = {"PYTHONPATH": f"{ROOT / 'examples' / 'cpu_quickstart' / 'shims'}:{SGLANG}"}
TOKENS = (10, 250)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not (SGLANG / "sglang").exists():
        pytest.skip("SGLang 0.5.23 is not there; set SGLANG_0523 to a directory that holds it")
    return str(write_tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def provider(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalProvider]:
    pools = {
        "bf16": Pool(view="bf16", slots_per_engine=8, sglang={"random_seed": 1}),
        "fp8kv": Pool(view="bf16", slots_per_engine=8, kv_cache_dtype="fp8_e4m3"),
    }
    fleet = Fleet(name="f", model=model, context_length=512, pools=pools)
    launched = LocalProvider(fleet, tmp_path_factory.mktemp("run"), extra_env=ENV)
    try:
        for pool in pools:
            launched.launch(pool)
        await_engines(launched, timeout_s=300)
        yield launched
    finally:
        launched.stop()


def test_doctor_finds_what_an_fp8_cache_changes(provider: LocalProvider, tmp_path: Path) -> None:
    config = Config(
        fleet=provider.fleet,
        algo=Algo(name="a", score_centering=True, weights="mis", top_p=0.97, top_k=64, head=64),
        weights=Weights(store=str(tmp_path)),
    )
    engines = {engine.name: engine.url or "" for engine in provider.list()}
    diagnosis = asyncio.run(doctor.diagnose(config, engines, token_range=TOKENS, max_kl=0.05, today=date.today()))
    print(*diagnosis.checks, *diagnosis.parity, sep="\n")
    failed = [check for check in diagnosis.checks if check.status == "failed" and check.subject != "miles"]
    assert failed == []
    bf16, fp8 = diagnosis.parity
    assert (bf16.kv_cache, fp8.kv_cache) == ("auto", "fp8_e4m3")
    assert bf16.attention == fp8.attention == "torch_native"
    assert bf16.kl < 1e-3, "the same engine, decode against prefill"
    assert fp8.kl > 3 * bf16.kl, "an FP8 cache shows"


def test_bench_measures_an_engine(provider: LocalProvider) -> None:
    episodes = synthetic_episodes(16, turns=6, first=60, appended=20, generated=12, max_context=400)
    ramp = Ramp(levels=(1, 4), warm_s=2, window_s=6, latency_s=10, max_lag_s=2.0)
    result = asyncio.run(
        bench(provider.address("bf16/0"), "bf16", episodes, ramp, max_context=500, token_range=TOKENS, seed=0)
    )
    print(result)
    one, four = result.points
    assert one.errors == four.errors == 0
    assert four.turns_per_hour > one.turns_per_hour > 0
    assert 0 < one.p50_s <= one.p90_s
    assert result.engine["version"].startswith("0.5.23")
    assert result.engine["attention_backend"] == "torch_native"


def test_unknown_server_arguments_are_refused_before_the_start(model: str, tmp_path: Path) -> None:
    pool = Pool(view="bf16", slots_per_engine=1, sglang={"atention_backend": "torch_native"})
    fleet = Fleet(name="f", model=model, context_length=512, pools={"p": pool})
    with pytest.raises(ConfigError, match=r"fleet\.pools\.p\.sglang\.atention_backend: this SGLang has no such"):
        LocalProvider(fleet, tmp_path, extra_env=ENV).launch("p")


def test_a_model_that_is_not_there_is_the_cause(tmp_path: Path, model: str) -> None:
    pools = {"p": Pool(view="bf16", slots_per_engine=1)}
    provider = LocalProvider(
        Fleet(name="f", model="/nowhere", context_length=512, pools=pools), tmp_path, extra_env=ENV
    )
    provider.launch("p")
    started = time.monotonic()
    with pytest.raises(
        EngineError, match=r"^pool p: engine p/0 exited with status \d+: .*nowhere.*; see .*engine-p-0\.log"
    ):
        await_engines(provider, timeout_s=240)
    assert time.monotonic() - started < 240
    provider.stop()
