"""HTTP headers between the router and those who call it; docs/router.md says what each means."""

from __future__ import annotations

import os

from multidict import istr

from miles_mixprec.config import Router
from miles_mixprec.errors import ConfigError

SESSION = istr("X-SMG-Routing-Key")
MIN_VERSION = istr("X-Mixprec-Min-Version")
POOL, ENGINE, VIEW = istr("X-Mixprec-Pool"), istr("X-Mixprec-Engine"), istr("X-Mixprec-View")
WEIGHT_VERSION = istr("X-Mixprec-Weight-Version")


def client_token(router: Router) -> str | None:
    """The token that opens the data path. Raises ConfigError, like `admin_token`, for a variable that holds none."""
    return _token("router.client_token_env", router.client_token_env)


def admin_token(router: Router) -> str | None:
    """The token that opens everything, where it is not the clients'."""
    return _token("router.admin_token_env", router.admin_token_env)


def authorization(router: Router, *, admin: bool = False) -> dict[str, str]:
    """Headers that the router asks of its clients, or of its administrators. Raises ConfigError."""
    token = (admin and admin_token(router)) or client_token(router)
    return {"Authorization": f"Bearer {token}"} if token else {}


def _token(option: str, name: str | None) -> str | None:
    if name is None:
        return None
    if token := os.environ.get(name):
        return token
    raise ConfigError(f"{option}={name}: the environment variable {name} is empty; put the token there")
