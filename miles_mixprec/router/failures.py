"""What the router itself answers with, each an HTTP status and a typed JSON body that clients can act on."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from miles_mixprec.errors import MixprecError, PoolUnavailable


class Refused(MixprecError):
    """A request that the router will not serve as it stands. The body is `{"error": {"type", "message", ...}}`."""

    status = 400
    kind = "bad_request"
    retry_after_s: int | None = None

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details

    def response(self) -> web.Response:
        error = {"type": self.kind, "code": self.status, "message": str(self), **self.details}
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.json_response({"error": error, "message": str(self)}, status=self.status, headers=headers)


class Unauthorized(Refused):
    status, kind = 401, "unauthorized"


class Forbidden(Refused):
    status, kind = 403, "forbidden"


class NotFound(Refused):
    status, kind = 404, "not_found"


class Conflict(Refused):
    status, kind = 409, "conflict"


class VersionGate(Refused):
    """No engine of the session's pool served an accepted weight version within `router.gate_wait_s`."""

    status, kind, retry_after_s = 409, "weight_version", 1


class Full(Refused):
    """Every slot of the fleet holds a live session."""

    status, kind, retry_after_s = 429, "no_free_slot", 2


class PoolLost(Refused, PoolUnavailable):
    """The session's pool has no usable engine. The session cannot go on in another one; start a new session."""

    status, kind = 503, "pool_unavailable"


class NoPool(Refused):
    """No pool takes new sessions."""

    status, kind, retry_after_s = 503, "no_pool", 2


class StoreAway(Refused):
    """The shared session store does not answer, and this router has no copy of the session's pin."""

    status, kind, retry_after_s = 503, "session_store", 2


class EngineFailed(Refused):
    """Engines of the pool failed this turn as often as the retry budget allows."""

    status, kind, retry_after_s = 502, "engine_failed", 1


class Deadline(Refused):
    """`router.request_timeout_s` is over."""

    status, kind = 504, "deadline"
