"""Who sends which token to the router, and what is said when there is none."""

import pytest

from miles_mixprec.config import Router
from miles_mixprec.errors import ConfigError
from miles_mixprec.headers import authorization


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_each_role_sends_its_own_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADERS_TEST_CLIENT", "c")
    monkeypatch.setenv("HEADERS_TEST_ADMIN", "a")
    both = Router(client_token_env="HEADERS_TEST_CLIENT", admin_token_env="HEADERS_TEST_ADMIN")
    assert authorization(both) == bearer("c")
    assert authorization(both, admin=True) == bearer("a")
    assert authorization(Router(client_token_env="HEADERS_TEST_CLIENT"), admin=True) == bearer("c")
    assert authorization(Router(admin_token_env="HEADERS_TEST_ADMIN")) == {}, "the data path is open"
    assert authorization(Router()) == authorization(Router(), admin=True) == {}


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_without_a_token_is_refused(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADERS_TEST_CLIENT", raising=False)
    if value is not None:
        monkeypatch.setenv("HEADERS_TEST_CLIENT", value)
    with pytest.raises(ConfigError, match=r"router\.client_token_env=HEADERS_TEST_CLIENT: the environment variable"):
        authorization(Router(client_token_env="HEADERS_TEST_CLIENT"))
