"""Who may call what, which engines may be registered, and which headers may cross the router."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy, istr
from yarl import URL

from miles_mixprec import headers
from miles_mixprec.config import Router
from miles_mixprec.router.failures import Forbidden, Refused, Unauthorized

_HOP_BY_HOP = (  # RFC 9110 section 7.6.1
    *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection"),
    *("TE", "Trailer", "Transfer-Encoding", "Upgrade"),
)
NOT_TO_ENGINE = tuple(map(istr, (*_HOP_BY_HOP, "Host", "Content-Length", "Expect", headers.MIN_VERSION)))
NOT_TO_CLIENT = tuple(map(istr, (*_HOP_BY_HOP, "Date", "Server", "Content-Length")))
ACCEPT_ENCODING, AUTHORIZATION, CONNECTION = istr("Accept-Encoding"), istr("Authorization"), istr("Connection")
MAX_KEY = 256


class Access:
    """Bearer tokens of clients and administrators. Without an admin token, the client token opens everything."""

    def __init__(self, router: Router) -> None:
        self.client = headers.client_token(router)
        self.admin = headers.admin_token(router)
        self.guarded = self.client is not None or self.admin is not None  # the header is the router's own

    def check(self, request: web.BaseRequest, *, admin: bool = False) -> None:
        """Raises Unauthorized (no token) or Forbidden (the wrong one)."""
        needed = (self.admin or self.client) if admin else self.client
        if needed is None:
            return
        scheme, _, given = request.headers.get(AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer" or not given:
            raise Unauthorized("a bearer token is required in the Authorization header")
        accepted = (needed,) if admin or self.admin is None else (needed, self.admin)
        if not any(hmac.compare_digest(token.encode(), given.encode(errors="surrogateescape")) for token in accepted):
            raise Forbidden(f"this token does not open {'administration' if admin else 'the router'}")


def engine_url(text: Any, allowed: Iterable[str]) -> str:
    """`text` as the canonical origin of an engine. Raises Refused or Forbidden.

    `allowed` holds host names or patterns such as `10.0.*` or `*.internal`. A data-parallel suffix (`@0`) that Miles
    may append names the same server and is dropped.
    """
    if not isinstance(text, str) or len(text) > 512:
        raise Refused("an engine needs a url, a string like http://10.0.0.7:30000")
    head, _, rank = text.rpartition("@")
    try:
        url = URL(head if head and rank.isdigit() else text)
        host, port = url.host, url.port
    except ValueError as error:
        raise Refused(f"engine url {text!r}: {error}") from None
    if url.scheme not in ("http", "https") or not host or port is None or url.user or url.password:
        raise Refused(f"engine url {text!r}: need http(s)://host:port, without credentials")
    if url.path not in ("", "/") or url.query_string or url.fragment:
        raise Refused(f"engine url {text!r}: must end after the port")
    if not any(fnmatchcase(host, pattern) for pattern in allowed):
        raise Forbidden(f"engine host {host} is not in router.allowed_workers; add it there if it is yours")
    return str(url.origin())


def session_key(request: web.BaseRequest) -> str | None:
    """The session that a request belongs to. Raises Refused for keys that are too long or not printable ASCII."""
    key = request.headers.get(headers.SESSION)
    if not key:
        return None
    if len(key) > MAX_KEY or not (key.isascii() and key.isprintable()):
        raise Refused(f"X-SMG-Routing-Key: at most {MAX_KEY} printable ASCII characters")
    return key


def to_engine(headers: CIMultiDictProxy[str], *, authorization: bool) -> CIMultiDict[str]:
    """Request headers to pass on: without hop-by-hop ones, and asking for an uncompressed reply.

    Uncompressed, because a heartbeat cannot be put in front of a compressed body. The length is framed anew.
    """
    kept = _without(headers, NOT_TO_ENGINE)
    if not authorization:
        kept.popall(AUTHORIZATION, None)
    kept[ACCEPT_ENCODING] = "identity"
    return kept


def to_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Reply headers to pass back; the length is framed anew."""
    return _without(headers, NOT_TO_CLIENT)


def _without(headers: CIMultiDictProxy[str], unwanted: tuple[istr, ...]) -> CIMultiDict[str]:
    kept = CIMultiDict(headers)
    for name in headers.get(CONNECTION, "").split(","):
        kept.popall(name.strip(), None)
    for name in unwanted:
        kept.popall(name, None)
    return kept
