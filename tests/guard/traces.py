"""Synthetic runs, shaped like published ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from miles_mixprec.guard.signals import Mean, PoolSignals, Signals

Curve = Callable[[int], float]


def ramp(start: float, end: float, first: int, last: int) -> Curve:
    """`start` until update `first`, then straight to `end` at update `last`, and there."""

    def value(n: int) -> float:
        done = min(max((n - first) / (last - first), 0.0), 1.0)
        return start + done * (end - start)

    return value


def wobble(curve: Curve, size: float) -> Curve:
    """Deterministic relative noise."""
    return lambda n: curve(n) * (1 + size * ((n * 7919 % 13) / 6 - 1))


def flat(value: float) -> Curve:
    return lambda n: value


def run(
    updates: int,
    *,
    reward: Curve = lambda n: 0.4,
    kl: Curve = lambda n: 1e-3,
    format_errors: Curve = lambda n: 0.0,
    length_capped: Curve = lambda n: 0.02,
    tail_ratio: Curve = lambda n: 1.0,
    grad_norm: Curve = lambda n: 0.2,
    pool_kl: Mapping[str, Curve] | None = None,
) -> list[Signals]:
    return [
        Signals(
            update=n,
            reward=Mean(reward(n), 1),
            kl=Mean(kl(n), 1),
            format_errors=Mean(format_errors(n), 1),
            length_capped=Mean(length_capped(n), 1),
            tail_ratio=Mean(tail_ratio(n), 1),
            grad_norm=grad_norm(n),
            pools={name: pool(kl=curve(n)) for name, curve in (pool_kl or {}).items()},
        )
        for n in range(updates)
    ]


def pool(*, kl: float, samples: int = 32, of: int = 96, versions: Sequence[int] = (0, 0)) -> PoolSignals:
    return PoolSignals(
        share=Mean(samples, of),
        tokens=1000,
        turns=60,
        reward=Mean(0.4 * samples, samples),
        format_errors=Mean(0, samples),
        aborted=Mean(0, samples),
        staleness=Mean(samples, samples),
        versions=(versions[0], versions[1]),
        kl=Mean(kl * 1000, 1000),
        masked=Mean(10, 1000),
    )


def grpo_mixed() -> list[Signals]:
    """Plain GRPO on mixed samplers: 6% format errors at update 20, 62% at 40, then 70% and more."""
    return run(
        90,
        reward=wobble(lambda n: ramp(0.40, 0.44, 0, 20)(n) - ramp(0, 0.36, 22, 42)(n), 0.08),
        kl=wobble(ramp(4.7e-3, 3e-2, 20, 42), 0.15),
        format_errors=wobble(lambda n: ramp(0.0, 0.06, 5, 20)(n) + ramp(0, 0.64, 24, 42)(n), 0.1),
        grad_norm=wobble(ramp(0.2, 0.8, 25, 45), 0.2),
    )


def sc_mixed() -> list[Signals]:
    """Score centering alone: tail ratio 1.2 to 52 from update 33, gradient norm at 44, reward 0.36 to 0.1 by 49."""
    return run(
        60,
        reward=wobble(lambda n: ramp(0.3, 0.36, 0, 30)(n) - ramp(0, 0.27, 40, 48)(n), 0.08),
        kl=wobble(ramp(4.7e-3, 4e-2, 36, 48), 0.15),
        format_errors=wobble(ramp(0.02, 0.73, 38, 55), 0.1),
        tail_ratio=wobble(ramp(1.2, 52, 32, 36), 0.05),
        grad_norm=lambda n: 4.0 if 44 <= n <= 46 else 0.2,
    )


def grpo_top_p_length() -> list[Signals]:
    """GRPO with top-p: few format errors in the end, turns at maximum length."""
    return run(
        110,
        reward=wobble(lambda n: ramp(0.4, 0.5, 0, 50)(n) - ramp(0, 0.35, 62, 85)(n), 0.08),
        kl=wobble(ramp(4e-3, 1e-2, 60, 90), 0.1),
        format_errors=wobble(flat(0.03), 0.5),
        length_capped=wobble(ramp(0.02, 0.85, 60, 80), 0.1),
    )


def healthy_mixed() -> list[Signals]:
    """Stable to the end at 4.7 times the homogeneous KL, with the format-error wobbles that such runs show."""
    return run(
        220,
        reward=wobble(ramp(0.35, 0.62, 0, 120), 0.15),
        kl=wobble(ramp(4.7e-3, 8e-3, 0, 200), 0.3),
        format_errors=lambda n: 0.15 if 198 <= n <= 206 else 0.08 if n in (80, 100) else 0.01,
        length_capped=wobble(ramp(0.02, 0.12, 0, 200), 0.3),
        tail_ratio=wobble(flat(1.0), 0.001),
        grad_norm=lambda n: 1.5 if n % 40 == 39 else 0.2 + 0.05 * (n % 3),
        pool_kl={
            "h200-fp8": wobble(ramp(3e-3, 6e-3, 0, 200), 0.3),
            "b300-nvfp4": wobble(ramp(9e-3, 1.4e-2, 0, 200), 0.3),
            "h100-bf16": wobble(ramp(1e-3, 2.5e-3, 0, 200), 0.3),
        },
    )
