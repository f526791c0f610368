"""Records of Miles' session server, as both generations write them, become the record of the merged sample."""

import asyncio
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from test_capture import HEAD, TOP_P, reply

from miles_mixprec import config as configuration
from miles_mixprec import miles
from miles_mixprec.errors import ConfigError, ContractError
from miles_mixprec.rollout import agentic
from miles_mixprec.rollout.agentic import Capture, align, chat_fields, session_key
from miles_mixprec.rollout.generate import RECORD


class Sample(SimpleNamespace):
    class Status:
        TRUNCATED, ABORTED = "truncated", "aborted"


def turn(prompt, output, version):
    """A session record: the whole request and the whole chat reply."""
    meta = {
        "weight_version": str(version),
        "output_token_sampling_mask": [[token, 999] for token in output],
        "output_token_sampling_logprobs": [[-0.6931472, -0.6931472] for _ in output],
    }
    choice = {
        "message": {},
        **{k: v for k, v in reply(output, [-0.5] * len(output), **meta).items() if k != "output_ids"},
    }
    return {"request": {"input_ids": prompt}, "response": {"choices": [choice]}, "status_code": 200}


def episode(turns, stops):
    """Tokens of a session whose template renders the stop token itself wherever `stops` says so."""
    tokens, records, kept, token = [1, 2, 3], [], [], 10
    for index, (generated, observed) in enumerate(turns):
        output = list(range(token, token + generated))
        records.append(turn(list(tokens), [*output, 7] if stops[index] else output, index))
        kept.append(output)
        tokens += output + [500 + token + i for i in range(observed)]
        token += 50
    return tokens, records, kept


def capture(records, engines=None):
    session = {
        "pool": "fp8",
        "view": "fp8",
        "turns": [{"engine": name} for name in engines or ["fp8/0"] * len(records)],
    }
    return Capture(SimpleNamespace(algo=TOP_P), {}, records, session)


def sample_of(tokens, prompt=3):
    return Sample(tokens=tokens, response_length=len(tokens) - prompt, status="completed", metadata={})


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4), st.data())
def test_rows_follow_the_merged_tokens(turns, data):
    stops = data.draw(st.lists(st.booleans(), min_size=len(turns), max_size=len(turns)))
    tokens, records, kept = episode(turns, stops)
    sample = sample_of(tokens)
    trajectory = align(sample, capture(records))
    record, log_probs = trajectory.record(), trajectory.log_probs()
    sampled = {token for output in kept for token in output}
    for r, token in enumerate(tokens[3:]):
        members = record.support.ids[record.support.offsets[r] : record.support.offsets[r + 1]].tolist()
        assert members == ([token, 999] if token in sampled else [])
        assert (record.weight_versions[r] >= 0) == (token in sampled)
        assert log_probs[r] == pytest.approx(-0.6931472 if token in sampled else 0.0)
    assert [turn["weight_version"] for turn in record.attribution()] == list(range(len(turns)))


@pytest.mark.parametrize("left", [2, 4])
def test_a_sample_cut_at_its_maximum_length_keeps_the_turns_before(left):
    """Cut inside the second turn, and inside the observation after it."""
    tokens, records, _ = episode([(3, 2), (3, 2), (3, 1)], [False] * 3)
    trajectory = align(sample_of(tokens[: 3 + 5 + left]), capture(records))
    assert len(trajectory.turns) == 2


def test_rewritten_history_is_refused():
    tokens, records, _ = episode([(3, 2), (3, 2)], [False, False])
    records[1]["request"]["input_ids"] = tokens[:5]
    with pytest.raises(ContractError, match=r"pool fp8: .*"):
        align(sample_of(tokens), capture(records))


def test_turns_taken_back_leave_attribution_open_only_across_engines():
    tokens, records, _ = episode([(2, 1), (2, 1)], [False, False])
    align(sample_of(tokens), capture(records, ["fp8/0"] * 3))
    with pytest.raises(ContractError, match=r"served 3 turns on fp8/0, fp8/1, the session server kept 2"):
        align(sample_of(tokens), capture(records, ["fp8/0", "fp8/1", "fp8/0"]))


def test_chat_requests_sample_and_record_as_native_ones():
    fields = chat_fields(TOP_P, {"max_new_tokens": 5, "skip_special_tokens": False, "top_p": 0.97})
    assert fields["max_tokens"] == 5 and fields["top_k"] == 64 and fields["min_p"] == 0.0
    assert (
        fields["return_sampling_mask"] and fields["sampling_logprobs_mode"] == "support" and fields["return_meta_info"]
    )
    assert "input_ids" not in fields and "sampling_params" not in fields and "skip_special_tokens" not in fields
    head = chat_fields(HEAD, {})
    assert head["top_logprobs"] == 3 and head["return_flat_raw_output_top_logprobs"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_the_session_id_is_the_routing_key(suffix):
    assert session_key(f"http://127.0.0.1:30000/sessions/abc{suffix}") == "abc"
    with pytest.raises(ConfigError, match="--use-session-server"):
        session_key("http://127.0.0.1:30000/v1")


@asynccontextmanager
async def servers(records):
    """Router and session server in one: what is asked of it, with the headers it got."""
    asked = []

    async def session(request):
        asked.append((request.method, request.headers.get("Authorization")))
        return web.json_response({"pool": "fp8", "view": "fp8", "turns": [{"engine": "fp8/0"}], "records": records})

    app = web.Application()
    app.router.add_route("*", "/sessions/{key}", session)
    async with TestServer(app) as server:
        yield server, asked


def play(monkeypatch, user_agent, name=f"{__name__}.user_agent", **overrides):
    """One agentic episode under a Miles that, like the real one, logs what the agent raises and goes on."""
    monkeypatch.setitem(globals(), "user_agent", user_agent)
    tokens, records, _ = episode([(3, 0)], [False])

    async def scenario():
        async with servers(records) as (server, asked):
            values = {
                "run_dir": "x", "run_id": "run", "updates": 1, "prompts_per_update": 1, "fleet.model": "m",
                "weights.store": "s", "rollout.agent": name, "router.host": server.host, "router.port": server.port,
                **overrides,
            }  # fmt: skip
            config = configuration.load("config", [f"{key}={value}" for key, value in values.items()])

            async def of_miles(input):
                with suppress(Exception):
                    await agentic.agent(
                        base_url=f"{server.make_url('/sessions/abc')}/v1", prompt="p", request_kwargs={}, metadata={}
                    )
                return SimpleNamespace(samples=sample_of(tokens))

            monkeypatch.setattr(miles, "agentic_generate", of_miles)
            args = SimpleNamespace(mixprec=configuration.to_mapping(config))
            output = await agentic.generate(SimpleNamespace(args=args, sampling_params={}))
            return output.samples, asked

    return asyncio.run(scenario())


def test_an_agent_s_session_becomes_a_record(monkeypatch):
    async def user_agent(base_url, prompt, request_kwargs, metadata):
        assert request_kwargs["extra_headers"] == {"X-SMG-Routing-Key": "abc"} and prompt == "p"

    sample, asked = play(monkeypatch, user_agent)
    assert sample.status == "completed" and vars(sample)[RECORD].engines == ["fp8/0"]
    assert [method for method, _ in asked] == ["GET", "GET", "DELETE"]


def test_an_agent_that_fails_aborts_its_sample_and_frees_the_session(monkeypatch):
    """Miles has a sample of the turns before; nothing of it was captured."""

    async def user_agent(**_):
        raise TimeoutError("sandbox")

    sample, asked = play(monkeypatch, user_agent)
    assert (
        sample.status == "aborted" and sample.metadata["mixprec"]["lost"] == "the agent failed: TimeoutError: sandbox"
    )
    assert [method for method, _ in asked] == ["DELETE"]


def test_an_agent_that_cannot_be_imported_stops_the_run(monkeypatch):
    with pytest.raises(ConfigError, match=r"rollout\.agent=nowhere\.agent"):
        play(monkeypatch, None, name="nowhere.agent")


def test_the_agent_s_requests_open_a_router_with_a_token(monkeypatch):
    monkeypatch.setenv("ROUTER_TOKEN", "secret")

    async def user_agent(request_kwargs, **_):
        assert request_kwargs["extra_headers"]["Authorization"] == "Bearer secret"

    sample, asked = play(monkeypatch, user_agent, **{"router.client_token_env": "ROUTER_TOKEN"})
    assert sample.status == "completed"
    assert {token for method, token in asked if method == "DELETE"} == {"Bearer secret"}
