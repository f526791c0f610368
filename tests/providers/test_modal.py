"""The app of a fleet, built and looked at offline."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

modal = pytest.importorskip("modal")
pytestmark = pytest.mark.filterwarnings("ignore::Warning")

from miles_mixprec.config import Config, load, to_file, to_mapping  # noqa: E402
from miles_mixprec.errors import ConfigError, EngineError  # noqa: E402
from miles_mixprec.providers.base import Engine, Health  # noqa: E402
from miles_mixprec.providers.modal import (  # noqa: E402
    CONFIG_VARIABLE,
    ModalProvider,
    build_app,
    container_config,
    engine_options,
)

RUN = ["run_dir=r", "run_id=a", "updates=1", "prompts_per_update=1", "weights.store=/store"]
TOKENS = ["router.client_token_env=CLIENT_TOKEN", "router.admin_token_env=ADMIN_TOKEN"]
PLACE = ["fleet.modal.region=us-east", "fleet.modal.secrets=[mixprec]", "+fleet.modal.volumes={/store: weights}"]


def config(fleet: str = "article_mixed", *overrides: str) -> Config:
    return load("config", [f"fleet={fleet}", *RUN, *TOKENS, *PLACE, *overrides])


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", CONFIG_VARIABLE, "MIXPREC_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none.toml"))
    yield


def spec(cls: Any) -> Any:
    return cls._get_class_service_function()._spec_


@pytest.mark.parametrize("fleet", ["article_mixed", "article_homogeneous", "planned"])
def test_one_class_per_pool(fleet: str) -> None:
    run = config(fleet)
    built = build_app(run)
    assert built.app.name == "mixprec-a"
    assert list(built.engines) == list(run.fleet.pools)
    assert set(built.classes) == {f"Engine_{name}" for name in run.fleet.pools} | {"Router"}
    for name, pool in run.fleet.pools.items():
        found = spec(built.engines[name])
        assert found.cpu == 10
        assert found.memory == (pool.memory_gib * 1024, 512 * 1024)
        assert found.ephemeral_disk == 512 * 1024
        assert list(found.volumes) == ["/store"]
        assert len(found.secrets) == 2, "the named one and the run's configuration"
    assert spec(built.classes["Router"]).gpus is None


def test_accelerators_and_widths() -> None:
    built = build_app(config())
    gpus = {name: spec(cls).gpus for name, cls in built.engines.items()}
    assert gpus == {
        "h100_fp8": "H100!:1",
        "h200_fp8": "H200:1",
        "b200_nvfp4": "B200:1",
        "b300_nvfp4": "B300:1",
        "a100_bf16": "A100-80GB:2",
        "rtx_pro_6000_bf16": "RTX-PRO-6000:2",
        "h100_bf16": "H100!:2",
        "h200_bf16": "H200:1",
    }


def test_scale_and_region() -> None:
    run = config("article_mixed", "fleet.pools.h200_fp8.max_engines=20")
    options = engine_options(run, "h200_fp8")
    assert (options["min_containers"], options["max_containers"]) == (8, 20)
    assert (options["region"], options["i6pn"]) == ("us-east", True)
    fixed = engine_options(run, "h100_fp8")
    assert (fixed["min_containers"], fixed["max_containers"]) == (8, 8)


def test_containers_rebuild_the_same_app(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = config("planned")
    options = engine_options(run, "h200_fp8")
    monkeypatch.setenv(CONFIG_VARIABLE, options["env"][CONFIG_VARIABLE])
    assert container_config() == run
    module = importlib.reload(importlib.import_module("miles_mixprec.providers.modal_app"))
    assert module.Engine_h200_fp8 is module.built.engines["h200_fp8"]
    user_class = module.Engine_b300_nvfp4._get_user_cls()
    assert (user_class.pool, user_class.config) == ("b300_nvfp4", run)
    monkeypatch.delenv(CONFIG_VARIABLE)
    path = tmp_path / "run.yaml"
    to_file(run, path)
    monkeypatch.setenv("MIXPREC_RUN", str(path))
    assert container_config() == run


def test_no_router_where_one_runs_elsewhere() -> None:
    built = build_app(config("planned", "fleet.modal.router_url=https://router.example"))
    assert "Router" not in built.classes


def test_credentials_are_asked_for_in_one_line() -> None:
    with pytest.raises(EngineError) as error:
        ModalProvider(config("planned")).launch("h200_fp8")
    assert str(error.value) == (
        "provider modal: no valid Modal credentials; run `modal token new`, or set MODAL_TOKEN_ID and "
        "MODAL_TOKEN_SECRET"
    )


def test_settings_that_cannot_work() -> None:
    build_app(load("config", ["fleet=planned", *RUN, *PLACE]))
    public = load("config", ["fleet=planned", *RUN, *PLACE, "fleet.modal.private=false"])
    with pytest.raises(ConfigError, match=r"public address: set router\.client_token_env and router\.admin_token_env"):
        build_app(public)
    with pytest.raises(ConfigError, match=r"private addresses exist within one region; set fleet\.modal\.region"):
        build_app(load("config", ["fleet=planned", *RUN, *TOKENS]))
    with pytest.raises(ConfigError, match="MIXPREC_RUN is not set"):
        container_config()


class Directory(dict):  # type: ignore[type-arg]
    """modal.Dict as far as containers use it."""

    def put(self, key: str, value: Any, *, skip_if_exists: bool = False) -> bool:
        if skip_if_exists and key in self:
            return False
        self[key] = value
        return True


def test_containers_claim_free_and_abandoned_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_mixprec.providers import modal as provider

    container = provider._EngineContainer()
    container.directory = Directory()
    assert container._claim("p/0")
    assert not container._claim("p/0"), "its owner reported just now"
    container.directory["p/0"]["at"] -= provider.LOST_S + 1
    assert container._claim("p/0"), "its owner was preempted"


def test_states_come_from_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_mixprec.providers import modal as provider

    entries = Directory(
        {
            "h200_fp8/0": {"url": "http://[fdaa::1]:30000", "state": "ready", "detail": "", "at": 1e12},
            "h200_fp8/1": {"url": "http://[fdaa::2]:30000", "state": "ready", "detail": "", "at": 0.0},
            "router": {"url": "http://[fdaa::3]:8000", "public_url": "https://r.modal.host", "at": 1e12},
        }
    )
    monkeypatch.setattr(provider, "_directory", lambda config: entries)
    monkeypatch.setattr(ModalProvider, "_deploy", lambda self: build_app(self.config))
    found = ModalProvider(config("planned"))
    engines = found.launch("h200_fp8")
    assert len(engines) == 24
    assert [engine.url for engine in engines][:2] == ["http://[fdaa::1]:30000", None]
    assert found.health("h200_fp8/0").state == "ready"
    assert found.health("h200_fp8/1").detail == "Modal has not placed its container yet"
    with pytest.raises(EngineError, match=r"h200_fp8/5: not placed yet \(Modal has not placed its container yet\)"):
        found.address("h200_fp8/5")


def test_an_engine_that_is_ready_before_the_router_gets_its_sidecar_later(monkeypatch: pytest.MonkeyPatch) -> None:
    from miles_mixprec.providers import modal as provider

    class Beats:
        left = 3

        def wait(self, _: float) -> bool:
            self.left -= 1
            if self.left == 1:
                container.directory["router"] = {"url": "http://[fdaa::3]:8000"}
            return self.left == 0

    routers: list[str] = []
    monkeypatch.setattr(provider, "process_health", lambda *_: Health("ready"))
    monkeypatch.setattr(provider, "start_sidecar", lambda *_, router_url, **__: routers.append(router_url))
    container = provider._EngineContainer()
    container.config, container.directory, container.leaving = config("planned"), Directory(), Beats()
    container.engine = container.local = Engine("p", 0, "http://[fdaa::1]:30000")
    container.process = container.sidecar = None
    container._report()
    assert routers == ["http://[fdaa::3]:8000"]


def test_configuration_fits_an_environment_variable() -> None:
    assert len(json.dumps(to_mapping(config()))) < 32_000
