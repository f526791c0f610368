"""How long the mix planner takes and how far it stays from the relaxation: `python benchmarks/planner.py`."""

import random
import time

from miles_mixprec.config import load_fleet
from miles_mixprec.planner.mix import Anchor, Demand, Limits, Offer, solve
from miles_mixprec.planner.plan import offers_of


def random_problem(seed: int, offers: int, accelerators: int) -> tuple[list[Offer], Limits]:
    rng = random.Random(seed)
    made = []
    for i in range(offers):
        width, slots = rng.choice([1, 2, 4]), rng.randint(8, 64)
        price, cap = width * rng.uniform(2, 8), rng.choice([1.0, 0.3])
        made.append(Offer(f"o{i}", f"gpu{i % accelerators}", width, price, (Anchor(1000, slots),), max_share=cap))
    return made, Limits({f"gpu{i}": rng.randint(20, 200) for i in range(accelerators)})


def timed(offers: list[Offer], demand: Demand, limits: Limits) -> tuple[float, float]:
    """(seconds, distance from the relaxation)."""
    started = time.perf_counter()
    mix = solve(offers, demand, limits)
    return time.perf_counter() - started, mix.hourly / mix.lp_bound - 1


def main() -> None:
    article = offers_of(load_fleet(["fleet=article_mixed"]), context=64_000)
    problems = {
        "published pools, 1,344 sessions": [
            (article, Demand(1344, context=64_000), Limits({"h200": 24, "b300": 24})) for _ in range(20)
        ],
        "48 offers on 12 accelerators, 8,000 sessions": [
            (offers, Demand(8000, context=1000), limits)
            for offers, limits in (random_problem(seed, 48, 12) for seed in range(20))
        ],
    }
    for name, cases in problems.items():
        results = sorted(timed(*case) for case in cases)
        worst = max(gap for _, gap in results)
        print(
            f"{name}: median {results[10][0] * 1000:.0f} ms, worst {results[-1][0] * 1000:.0f} ms, gap <= {worst:.3%}"
        )


if __name__ == "__main__":
    main()
