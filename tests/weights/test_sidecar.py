"""The sidecar against an engine and a router that fail at every step: nothing is served under a wrong version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
import safetensors.torch
import weight_models as models
from weight_fakes import FakeEngine, FakeRouter, fingerprint
from weight_runs import run_config

from miles_mixprec.config import Config
from miles_mixprec.errors import ConfigError, EngineError, StoreError
from miles_mixprec.weights import encode, sidecar, store
from miles_mixprec.weights.checkpoint import decode_checkpoint
from miles_mixprec.weights.sidecar import Sidecar

FAILURES = (StoreError, EngineError, aiohttp.ClientError, asyncio.TimeoutError)


class Killed(BaseException):
    """Ends a sidecar where it stands; nothing in it may react."""


class House:
    """A store, a fake engine, a fake router and the sidecar between them."""

    def __init__(self, root: Path, config: Config, view: str) -> None:
        self.root, self.config, self.view = root, config, view
        self.store = store.init(config.weights.store, "run")
        self.truth: dict[str, set[str]] = {"0": {"initial"}}

    async def start(self, session: aiohttp.ClientSession) -> None:
        self.session = session
        self.engine, self.router = FakeEngine(), FakeRouter()
        self.urls = await self.engine.start(), await self.router.start()
        self.sidecar = self.new_sidecar()

    def new_sidecar(self) -> Sidecar:
        staging = self.root / "staging"
        where = (self.config, self.urls[1], staging, self.session, sidecar.Stager(staging))
        return Sidecar(f"{self.view}/0", self.urls[0], *where)

    def publish(self, version: int, seed: int | None = None) -> None:
        tensors = models.moe(version if seed is None else seed, experts=2)
        self.store.publish("bf16", version, tensors.items(), models.CONFIG)
        if self.view != "bf16":
            encode.encode_version(self.store, self.store.latest("bf16"), [self.view], self.root / "encode")
        clean = self.root / f"clean-{version}-{self.store.attempt}"
        decode_checkpoint(Path(self.store.directory(self.view, version)), clean)
        self.truth.setdefault(str(version), set()).add(fingerprint(clean))

    async def settle(self) -> None:
        """Step until the engine serves the newest version; failures on the way are the sidecar's to retry."""
        for _ in range(6):
            try:
                await self.sidecar.step()
            except FAILURES:
                continue
            if self.router.states[-1] == ("serving", self.store.latest(self.view).version):
                return
        raise AssertionError(f"did not settle: {self.router.states}")

    def check(self) -> None:
        for version, weights in self.engine.served:
            assert weights in self.truth[version], f"weights served as {version} are not those of {version}"


def house(test: Callable[[House], Awaitable[None]], root: Path, view: str = "nvfp4") -> House:
    built = House(root, run_config(root), view)

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            await built.start(session)
            try:
                await test(built)
            finally:
                await built.engine.server.close()
                await built.router.server.close()

    asyncio.run(run())
    built.check()
    return built


@pytest.mark.parametrize("view", ["bf16", "nvfp4"])
def test_an_engine_follows_and_the_router_hears_what_it_serves(view: str, tmp_path: Path) -> None:
    async def test(h: House) -> None:
        await h.sidecar.step()
        assert h.router.states == [("serving", 0)]  # nothing published yet: the model that it was started from
        for version in range(4):
            h.publish(version)
            await h.settle()
            assert h.engine.version == str(version) and h.engine.weights in h.truth[str(version)]
        assert h.router.states[1:] == [s for v in range(4) for s in (("updating", None), ("serving", v))]
        assert h.router.views == [(view, v, "run#1") for v in range(4)]
        update = ["pause_generation", "update_weights_from_disk", "continue_generation"]
        assert h.engine.calls == update * 4

    house(test, tmp_path, view)


def test_a_late_engine_joins_at_the_newest_version(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        for version in range(3):
            h.publish(version)
        await h.settle()
        assert h.engine.calls.count("update_weights_from_disk") == 1 and h.engine.version == "2"
        assert ("serving", 0) not in h.router.states

    house(test, tmp_path)


def test_a_restarted_sidecar_trusts_its_record_only_if_the_engine_agrees(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        h.publish(1)
        await h.settle()
        h.sidecar = h.new_sidecar()
        await h.settle()
        assert h.engine.calls.count("update_weights_from_disk") == 1
        h.engine.restart()
        h.sidecar = h.new_sidecar()
        await h.settle()
        assert h.engine.calls.count("update_weights_from_disk") == 2

    house(test, tmp_path)


def test_an_engine_that_restarted_stops_serving_until_it_is_up_to_date(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        h.publish(1)
        await h.settle()
        h.engine.restart()
        await h.settle()
        assert h.router.states[-2:] == [("updating", None), ("serving", 1)]

    house(test, tmp_path)


CALLS = ["pause_generation", "update_weights_from_disk", "continue_generation"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("when", ["die_before", "die_after", "fail"])
def test_an_engine_may_die_or_fail_at_each_step(when: str, call: str, tmp_path: Path) -> None:
    async def test(h: House) -> None:
        h.publish(1)
        await h.settle()
        h.publish(2)
        setattr(h.engine, when, call)
        with pytest.raises(FAILURES):
            await h.sidecar.step()
        assert h.router.states[-1] == ("updating", None)
        h.engine.fail = None
        await h.settle()
        assert h.engine.version == "2" and not h.engine.paused

    house(test, tmp_path)


SIDECAR_STEPS = [("_post", path) for path in CALLS] + [
    ("_register", "updating"),
    ("_register", "serving"),
    ("_announce", ""),
    ("_serve", "None"),
    ("_serve", "Pointer"),
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("method", "match"), SIDECAR_STEPS)
def test_a_sidecar_may_die_at_each_step(
    method: str, match: str, after: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(h: House) -> None:
        h.publish(1)
        await h.settle()
        h.publish(2)
        real = getattr(Sidecar, method)

        def dies(self: Sidecar, *arguments: object, **options: object) -> object:
            hit = match in str(arguments[0] if arguments else "")

            async def asynchronously() -> None:
                if hit and not after:
                    raise Killed
                await real(self, *arguments, **options)
                if hit:
                    raise Killed

            if asyncio.iscoroutinefunction(real):
                return asynchronously()
            if hit and not after:
                raise Killed
            real(self, *arguments, **options)
            if hit:
                raise Killed
            return None

        with monkeypatch.context() as patch:
            patch.setattr(Sidecar, method, dies)
            with pytest.raises(Killed):
                await h.sidecar.step()
        h.sidecar = h.new_sidecar()
        await h.settle()
        assert h.engine.version == "2" and not h.engine.paused

    house(test, tmp_path)


def test_a_resume_takes_engines_back_before_they_may_serve_again(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        for version in (1, 2, 3):
            h.publish(version)
            await h.settle()
        h.store = h.store.rewind(1)
        del h.router.workers[:], h.engine.served[:]
        await h.settle()
        assert h.router.states == [("updating", None), ("serving", 1)]
        assert h.router.views[-1] == ("nvfp4", 1, "run#2")
        assert {version for version, _ in h.engine.served} <= {"3", "1"}  # asked for its version before the pause
        h.publish(2, seed=99)  # another attempt's version 2 is another model
        await h.settle()
        assert h.engine.version == "2" and h.engine.weights == fingerprint(h.root / "clean-2-2")

    house(test, tmp_path)


def test_a_resume_during_an_update_keeps_the_engine_paused_until_it_went_back(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        h.publish(1)
        await h.settle()
        h.publish(2)
        real = h.sidecar._post

        async def resume_meanwhile(path: str, *arguments: object, **options: object) -> None:
            await real(path, *arguments, **options)
            if path == "/update_weights_from_disk":
                h.sidecar._post = real
                h.store = h.store.rewind(1)

        h.sidecar._post = resume_meanwhile
        with pytest.raises(StoreError, match="resumed meanwhile"):
            await h.sidecar.step()
        assert h.engine.version == "2" and h.engine.paused
        assert ("2", h.engine.weights) not in h.engine.served
        await h.settle()
        assert h.engine.version == "1" and not h.engine.paused

    house(test, tmp_path)


def test_an_engine_of_an_ended_attempt_waits_where_its_view_has_no_version(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        h.publish(3)
        await h.settle()
        h.store = h.store.rewind(1)
        await h.sidecar.step()
        assert h.store.latest("nvfp4") is None and h.router.states[-1] == ("updating", None)

    house(test, tmp_path)


def test_nothing_goes_back_within_an_attempt(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        for version in (1, 2):
            h.publish(version)
            await h.settle()
        old = store.Pointer(1, "run", 1, h.store.manifest("nvfp4", 1).digest)
        (h.root / "store" / "latest" / "nvfp4").write_bytes(msgspec.json.encode(old))
        with pytest.raises(StoreError, match="went back from version 2 to 1"):
            await h.sidecar.step()
        assert h.engine.version == "2" and h.router.states[-1] == ("serving", 2)

    house(test, tmp_path)


def test_a_damaged_version_is_not_loaded_and_the_engine_serves_on(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        h.publish(1)
        await h.settle()
        h.publish(2)
        file = next(Path(h.store.directory("nvfp4", 2)).glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
        for _ in range(2):
            with pytest.raises(StoreError, match="bytes differ"):
                await h.sidecar.step()
        assert h.engine.version == "1" and not h.engine.paused and h.router.states[-1] == ("serving", 1)
        h.publish(2)
        await h.settle()

    house(test, tmp_path)


def test_an_engine_serves_on_while_there_is_no_room_to_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async def test(h: House) -> None:
        h.publish(1)
        await h.settle()
        h.publish(2)
        with monkeypatch.context() as patch:
            patch.setattr(safetensors.torch, "save_file", full)
            with pytest.raises(StoreError, match="No space left"):
                await h.sidecar.step()
        assert h.router.states[-1] == ("serving", 1) and not h.engine.paused
        await h.settle()

    house(test, tmp_path)


def test_a_router_that_was_away_hears_it_all_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(h: House) -> None:
        h.publish(1)
        await h.settle()
        h.publish(2)
        h.router.down = True
        with pytest.raises(EngineError, match="router refuses"):
            await h.sidecar.step()
        assert not h.engine.paused  # an engine is not touched before the router knows
        h.router.down = False
        await h.settle()
        del h.router.workers[:]
        monkeypatch.setattr(h.config.router, "heartbeat_s", 0.0)
        await h.sidecar.step()
        assert h.router.states == [("serving", 2)]

    house(test, tmp_path)


def test_without_an_admin_token_the_client_token_opens_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIENT_TOKEN", "c")
    monkeypatch.setenv("ADMIN_TOKEN", "a")

    async def test(h: House) -> None:
        for client, admin, sent in [("CLIENT_TOKEN", None, "Bearer c"), ("CLIENT_TOKEN", "ADMIN_TOKEN", "Bearer a")]:
            h.config.router.client_token_env, h.config.router.admin_token_env = client, admin
            h.sidecar = h.new_sidecar()
            await h.sidecar.step()
            assert h.router.authorization == sent
        h.config.router.admin_token_env = "NOT_SET"
        with pytest.raises(ConfigError, match=r"router\.admin_token_env=NOT_SET"):
            h.new_sidecar()

    house(test, tmp_path)


def test_engines_of_one_view_share_what_is_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    real = sidecar.decode_checkpoint
    monkeypatch.setattr(sidecar, "decode_checkpoint", lambda *paths: (decoded.append(paths), real(*paths)))

    async def test(h: House) -> None:
        stager = sidecar.Stager(h.root / "staging")
        h.publish(1)
        pointer = h.store.latest("nvfp4")
        paths = await asyncio.gather(*(stager.directory(h.store, "nvfp4", pointer, "dequantized") for _ in range(3)))
        assert len(set(paths)) == 1 and len(decoded) == 1
        native = await stager.directory(h.store, "nvfp4", pointer, "native")
        assert native == Path(h.store.directory("nvfp4", 1))

    house(test, tmp_path)


def test_a_foreign_store_is_never_loaded(tmp_path: Path) -> None:
    async def test(h: House) -> None:
        h.publish(1)
        h.config.run_id = "other"
        with pytest.raises(StoreError, match="belongs to run run"):
            await h.sidecar.step()
        assert h.engine.calls == []

    house(test, tmp_path)
