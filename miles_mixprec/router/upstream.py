"""The HTTP client side: one connection pool to all engines."""

from __future__ import annotations

import aiohttp

KEEP_ALIVE_S = 4.0  # below uvicorn's 5 s, so that engines do not close a connection under a request
READ_BUFFER = 1024 * 1024
CONNECT_S = 5.0


class Upstream:
    """Holds the aiohttp session, which can only be made inside the running event loop."""

    session: aiohttp.ClientSession

    async def open(self) -> None:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BUFFER,
        )

    async def close(self) -> None:
        await self.session.close()
