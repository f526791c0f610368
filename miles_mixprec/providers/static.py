"""Engines that exist already, at the URLs stated per pool: bare metal, Kubernetes, Slurm, or any vendor."""

from __future__ import annotations

from collections.abc import Sequence

from miles_mixprec.config import Fleet
from miles_mixprec.errors import EngineError
from miles_mixprec.providers.base import Engine, Health, Provider, responds


class StaticProvider(Provider):
    """The engines at `fleet.pools.<name>.urls`. Nothing is started or stopped; `resize` uses more or fewer of them."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._used: dict[str, int] = {}

    def list(self) -> Sequence[Engine]:
        return [
            Engine(name, index, pool.urls[index].rstrip("/"))
            for name, pool in self.fleet.pools.items()
            for index in range(self._used.get(name, 0))
        ]

    def _resize(self, pool: str, engines: int) -> None:
        urls = self.fleet.pools[pool].urls
        if engines > len(urls):
            raise EngineError(
                f"pool {pool}: {engines} engines wanted, {len(urls)} known; add to fleet.pools.{pool}.urls"
            )
        self._used[pool] = engines

    def stop(self) -> None:
        self._used.clear()

    def health(self, name: str) -> Health:
        url = self.address(name)
        return Health("ready") if responds(url) else Health("starting", f"{url}/health does not answer")
