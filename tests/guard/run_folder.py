"""A run folder as a run of the CPU fleet leaves it, with synthetic figures."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from omegaconf import OmegaConf

from miles_mixprec.config import Config, load, to_mapping
from miles_mixprec.guard.signals import CONFIG, EvalLine, MetricsLog, PoolRollout, RolloutLine, TrainLine

KL = {"bf16": 4e-4, "fp8": 2e-3, "nvfp4": 9e-3}
SLOTS = [f"fleet.pools.{name}.slots_per_engine={n}" for name, n in (("bf16", 8), ("fp8", 16), ("nvfp4", 24))]
SLOTS += ["fleet.pools.fp8.hourly_price=0", "fleet.pools.nvfp4.hourly_price=0"]
SAMPLES = 96


def write_run(
    run_dir: Path,
    *,
    updates: int = 16,
    algo: str = "sc_mis_top_p",
    fleet: str = "cpu_quickstart",
    seed: int = 0,
    shares: dict[str, float] | None = None,
    mass_ratio: float = 1.0,
    reward: Callable[[int], float] = lambda n: 0.3 + 0.02 * n,
    kl_growth: Callable[[int], float] = lambda n: 1.0 + 0.02 * n,
) -> Config:
    """Write config.yaml and metrics.jsonl. Samples fall on pools by `shares`, else exactly by slots."""
    config = load(
        "config",
        [
            f"algo={algo}",
            f"fleet={fleet}",
            "fleet.model=models/tiny",
            f"run_dir={run_dir}",
            f"run_id={run_dir.name}",
            f"weights.store={run_dir}/store",
            f"updates={updates}",
            f"seed={seed}",
            "prompts_per_update=12",
            "fleet.pools.bf16.hourly_price=0.09",
            *(SLOTS if fleet == "cpu_quickstart" else ()),
        ],
    )
    run_dir.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(to_mapping(config)), run_dir / CONFIG)
    shares = shares or {name: pool.slots / config.fleet.slots for name, pool in config.fleet.pools.items()}
    noise = random.Random(seed)
    log = MetricsLog(run_dir)
    log.append(EvalLine(update=-1, time=999.0, pass_1=0.28, pass_4=0.5, episodes=128))
    for n in range(updates):
        mean = reward(n) + noise.uniform(-0.04, 0.04)
        pools = {
            name: PoolRollout(
                samples=round(SAMPLES * share),
                tokens=round(SAMPLES * share) * 45,
                reward=mean + noise.uniform(-0.05, 0.05),
                turns=round(SAMPLES * share) * 3,
                aborted=int(noise.random() < 0.1),
                format_errors=int(4 * share),
                staleness=min(n, 1 + noise.random()),
                versions=(max(n - 2, 0), n),
            )
            for name, share in shares.items()
        }
        log.append(
            RolloutLine(
                update=n,
                time=1000.0 + 11 * n,
                reward=mean,
                samples=sum(p.samples for p in pools.values()),
                format_errors=int(noise.uniform(0, 8)),
                length_capped=2,
                response_tokens=45 + noise.uniform(-3, 3),
                per_pool=pools,
            )
        )
        metrics: dict[str, float | None] = {}
        for name, part in pools.items():
            kl = KL[name] * kl_growth(n) * noise.uniform(0.8, 1.2)
            sums = {"kl": kl * part.tokens, "masked": 0.004 * kl / 1e-3 * part.tokens}
            for metric, value in sums.items():
                for group in (f"pool/{name}", f"view/{config.fleet.pools[name].view}", "all"):
                    for key, amount in ((f"{metric}_num", value), (f"{metric}_den", float(part.tokens))):
                        metrics[f"mixprec/{group}/{key}"] = (metrics.get(f"mixprec/{group}/{key}") or 0.0) + amount
        ratio = mass_ratio + noise.uniform(-1e-4, 1e-4)
        metrics |= {"mixprec/all/sampler_mass_num": ratio * 4000, "mixprec/all/trainer_mass_num": 4000.0}
        metrics |= {"mixprec/all/entropy_num": (1.1 - 0.02 * n) * 4000, "mixprec/all/entropy_den": 4000.0}
        metrics |= {"mixprec/all/rejected_num": 0.0, "mixprec/all/rejected_den": float(SAMPLES)}
        if not config.algo.support:
            metrics |= {"mixprec/all/tail_ratio_num": noise.uniform(38, 44), "mixprec/all/tail_ratio_den": 40.0}
        for lag, level in (("0-1", 1.0), ("2-3", 2.5)):
            kl = 4e-3 * level * kl_growth(n) * noise.uniform(0.8, 1.2)
            metrics |= {f"mixprec/lag/{lag}/kl_num": kl * 2000, f"mixprec/lag/{lag}/kl_den": 2000.0}
        log.append(
            TrainLine(
                update=n,
                time=1009.0 + 11 * n,
                seconds=noise.uniform(10, 12),
                grad_norm=noise.uniform(0.2, 0.4),
                metrics=metrics,
            )
        )
    log.append(EvalLine(update=updates - 1, time=2000.0, pass_1=0.55, pass_4=0.8, episodes=128))
    return config
