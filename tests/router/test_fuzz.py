"""Whatever arrives at whatever endpoint: no 5xx of the router's own making, no leak, and it still works."""

from __future__ import annotations

import json

from fake_engine import engines
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from running import KEY, play, running, settings

PATHS = st.sampled_from(
    [
        *("/generate", "/v1/chat/completions", "/v1/completions", "/v1/models", "/model_info", "/abort_request"),
        *("/workers", "/workers/a-0", "/add_worker", "/remove_worker", "/list_workers", "/views/bf16", "/views/x"),
        *("/sessions/s", "/sessions/%00", "/fleet", "/metrics", "/health", "/ready", "/", "/pools/a/drain"),
        *("/pools/a/undrain", "/flush_cache", "/add_worker?url=x", "/%2e%2e/etc", "/update_weights_from_disk"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WORKER = st.fixed_dictionaries(
    {},
    optional={
        "url": st.sampled_from(["http://127.0.0.1:9", "http://127.0.0.1:9@1", "http://[", "//x"]) | JSON,
        "pool": st.sampled_from(["a", "b", "A", "../x"]) | JSON,
        "view": st.sampled_from(["bf16", "fp8", "fp9"]) | JSON,
        "engine": st.sampled_from(["a/0", "b/0", "a/-1", "a"]) | JSON,
        "slots": st.integers(-5, 10**20) | JSON,
        "weight_version": st.integers(-5, 10**20) | JSON,
        "state": st.sampled_from(["serving", "updating", "draining", "x"]) | JSON,
        "version": st.integers(-5, 10**20) | JSON,
        "run": JSON,
    },
)
BODY = st.one_of(st.none(), WORKER, JSON).map(lambda v: None if v is None else json.dumps(v).encode()) | st.binary(
    max_size=200
)
KEYS = st.none() | st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=300)
REQUEST = st.tuples(st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"]), PATHS, BODY, KEYS)


@given(st.lists(REQUEST, min_size=1, max_size=25))
@hypothesis_settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_request(requests: list[tuple[str, str, bytes | None, str | None]]) -> None:
    async def scene() -> None:
        async with engines(1) as (fake,), running(settings(gate="any", gate_wait_s=0.1, max_attempts=1)) as router:
            await router.register(fake.url, "zz", slots=1000)
            for method, path, body, key in requests:
                headers = {"Content-Type": "application/json"} | ({} if key is None else {KEY: key})
                async with router.http.request(method, router.url + path, data=body, headers=headers) as reply:
                    payload = await reply.read()
                if reply.status >= 500 and path not in ("/health", "/ready"):
                    kind = json.loads(payload)["error"]["type"] if b'"error"' in payload else payload
                    told = json.loads(payload).get("engines") if path in ("/abort_request", "/flush_cache") else None
                    assert kind in ("pool_unavailable", "no_pool", "engine_failed") or told, (method, path, payload)
            for pool in list(router.fleet.pools):
                await router.call("POST", f"/pools/{pool}/{'undrain' if pool == 'zz' else 'drain'}")
            assert (await router.turn("at-the-end")).status == 200
            assert not router.proxy.turns and not any(e.in_flight for e in router.fleet.engines())
            hops = router.proxy.hops
            assert hops.received == hops.answered + sum(hops.refused.values())

    play(scene)
