"""The rollout's side of the router: one turn at a time, with the router's own retry hints."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from miles_mixprec.config import Router
from miles_mixprec.errors import EngineError, PoolUnavailable
from miles_mixprec.headers import ENGINE, POOL, SESSION, VIEW, authorization

RETRIED = (409, 429, 502, 503, 504)
_LOST = (aiohttp.ClientError, asyncio.TimeoutError)  # no answer, or none in time


@dataclass(frozen=True)
class Attribution:
    """Who served a turn, from the router's reply headers."""

    pool: str
    engine: str
    view: str


class RouterClient:
    """Talks to one router from one event loop. `close` it."""

    def __init__(self, url: str, router: Router) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = router.request_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            headers=authorization(router),
        )

    async def close(self) -> None:
        await self._session.close()

    async def generate(self, key: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], Attribution]:
        """One turn of session `key`: the engine's reply and who gave it.

        Raises PoolUnavailable when the session's pool is lost (the session is over), EngineError when the turn cannot
        be served in time or is refused.
        """
        deadline, wait = time.monotonic() + self.timeout_s, 0.2
        while True:
            try:
                async with self._session.post(f"{self.url}/generate", json=body, headers={SESSION: key}) as reply:
                    if reply.status == 200:
                        return _checked(await reply.json(content_type=None), key), _attribution(reply.headers, key)
                    refusal = f"{reply.status}: {(await reply.text())[:300]}"
                    status, hint = reply.status, reply.headers.get("Retry-After")
            except _LOST as error:
                refusal, status, hint = f"{type(error).__name__}: {error}", 502, None
            if status == 503 and hint is None:
                raise PoolUnavailable(f"session {key}: {refusal}")
            if status not in RETRIED or time.monotonic() + wait > deadline:
                raise EngineError(f"session {key}: the router at {self.url} does not serve the turn ({refusal})")
            await asyncio.sleep(float(hint) if hint else wait * (0.5 + random.random()))
            wait = min(2 * wait, 5.0)

    async def end(self, key: str) -> None:
        """Free the session's slot. A router that is gone has none to free."""
        with contextlib.suppress(*_LOST):
            async with self._session.delete(f"{self.url}/sessions/{key}"):
                pass

    async def session(self, key: str) -> dict[str, Any]:
        """The router's record of a session: pool, view and the engine and version of every turn."""
        async with self._session.get(f"{self.url}/sessions/{key}") as reply:
            if reply.status != 200:
                raise EngineError(f"session {key}: the router knows no such session ({reply.status})")
            return await reply.json()

    async def engines(self, view: str) -> list[str]:
        """URLs of the engines that serve `view`."""
        async with self._session.get(f"{self.url}/workers") as reply:
            workers = (await reply.json())["workers"]
        return sorted(worker["url"] for worker in workers if worker.get("view") == view)

    async def direct(self, engine_url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One turn on a given engine, past the router (evaluation). Raises EngineError."""
        try:
            async with self._session.post(f"{engine_url}/generate", json=body) as reply:
                if reply.status != 200:
                    raise EngineError(f"{engine_url} answered {reply.status}: {(await reply.text())[:300]}")
                return _checked(await reply.json(), engine_url)
        except _LOST as error:
            raise EngineError(f"{engine_url} does not answer ({type(error).__name__}: {error})") from error


def _checked(reply: Any, who: str) -> dict[str, Any]:
    if not isinstance(reply, dict) or "meta_info" not in reply:
        raise EngineError(f"{who}: the reply is not SGLang's ({str(reply)[:200]})")
    return reply


def _attribution(headers: Mapping[str, str], key: str) -> Attribution:
    try:
        return Attribution(headers[POOL], headers[ENGINE], headers[VIEW])
    except KeyError as error:
        raise EngineError(
            f"session {key}: the reply does not say which pool served it ({error}); "
            "point --sglang-router-ip/--sglang-router-port at the miles_mixprec router itself"
        ) from error
