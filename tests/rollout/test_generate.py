"""Episodes against a scripted router: what Miles gets back, and what is asked of the router on the way."""

import asyncio
from contextlib import asynccontextmanager
from enum import Enum
from types import SimpleNamespace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from test_capture import reply

from miles_mixprec import config as configuration
from miles_mixprec.errors import CapabilityError, ConfigError, EngineError
from miles_mixprec.rollout import generate as module
from miles_mixprec.rollout.environment import Step
from miles_mixprec.rollout.generate import RECORD, Setup, generate, load_named

HEADERS = {
    "X-Mixprec-Pool": "fp8",
    "X-Mixprec-Engine": "fp8/0",
    "X-Mixprec-View": "fp8",
    "X-Mixprec-Weight-Version": "4",
}
PARAMS = {"temperature": 1.0, "top_p": 0.97, "top_k": 64, "max_new_tokens": 16}


class Words:
    """A tokenizer of whole numbers."""

    def encode(self, text, add_special_tokens=False):
        return [int(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(map(str, ids))


class Count:
    """Asks for one more number until it has seen `label` of them; a negative one is a format error."""

    def __init__(self, wanted):
        self.wanted, self.seen, self.errors = wanted, 0, 0

    @classmethod
    def from_sample(cls, prompt, label, metadata):
        return cls(int(label))

    def step(self, reply):
        if reply == "13":
            self.errors += 1
            return Step("99", done=self.errors == 2, format_error=True)
        self.seen += 1
        return Step("98", done=self.seen == self.wanted)

    def grade(self):
        return float(self.seen == self.wanted)


class Sample(SimpleNamespace):
    class Status(Enum):
        COMPLETED, TRUNCATED, ABORTED = "completed", "truncated", "aborted"


def answer(token, finish="stop"):
    meta = {"output_token_sampling_mask": [[token, 500]], "output_token_sampling_logprobs": [[-0.7, -0.7]]}
    body = reply([token], [-0.7], **meta)
    body["meta_info"]["finish_reason"] = {"type": finish}
    return body


@asynccontextmanager
async def router(script, workers):
    """A router that plays `script`: bodies with status 200, or (status, headers, text). It is an engine as well."""
    asked, ended, steps = [], [], iter(script)

    async def turn(request):
        asked.append((request.headers.get("X-SMG-Routing-Key"), await request.json()))
        step = next(steps)
        if isinstance(step, tuple):
            return web.Response(status=step[0], headers=step[1], text=step[2])
        await asyncio.sleep(step.pop("delay", 0))
        headers = {**HEADERS, **step.pop("headers", {})}
        return web.json_response(step, headers=headers)

    async def end(request):
        ended.append(request.match_info["key"])
        return web.Response()

    async def engines(request):
        itself = {"url": f"http://{request.host}", "view": "bf16"}
        return web.json_response({"workers": [itself] if workers is None else workers})

    app = web.Application()
    app.router.add_post("/generate", turn)
    app.router.add_get("/workers", engines)
    app.router.add_delete("/sessions/{key}", end)
    async with TestServer(app) as server:
        yield server, asked, ended


def play(script, label="2", evaluation=False, workers=None, **overrides):
    """Run one episode; return (sample, requests, ended sessions)."""
    values = {
        "run_dir": "x", "run_id": "run", "updates": 1, "prompts_per_update": 1, "fleet.model": "m",
        "weights.store": "s", "rollout.max_turns": 4, "router.request_timeout_s": 5, **overrides,
    }  # fmt: skip
    config = configuration.load("config", [f"{key}={value}" for key, value in values.items()])

    async def scenario():
        async with router(script, workers) as (server, asked, ended):
            args = SimpleNamespace()
            module._setups[id(args)] = setup = Setup(config, Words(), Count, str(server.make_url("/")))
            try:
                sample = Sample(index=7, prompt="1 2", label=label, metadata={}, status=None)
                return await generate(args, sample, dict(PARAMS), evaluation), asked, ended
            finally:
                for client in setup.clients.values():
                    await client.close()
                del module._setups[id(args)]

    return asyncio.run(scenario())


def test_an_episode_becomes_a_sample():
    sample, asked, ended = play([answer(11), answer(12)])
    assert sample.tokens == [1, 2, 11, 98, 12]
    assert sample.response_length == 3 and sample.loss_mask == [1, 0, 1]
    assert sample.rollout_log_probs == pytest.approx([-0.7, 0.0, -0.7])
    assert sample.reward == 1.0 and sample.status == Sample.Status.COMPLETED
    assert sample.weight_versions == ["4", "4"]
    assert sample.metadata["mixprec"]["turns"][0] == {
        "pool": "fp8",
        "engine": "fp8/0",
        "view": "fp8",
        "weight_version": 4,
    }
    assert vars(sample)[RECORD].support.ids.tolist() == [11, 500, 12, 500]
    assert [key for key, _ in asked] == ["run-7", "run-7"] and ended == ["run-7"]
    assert asked[1][1]["input_ids"] == [1, 2, 11, 98]  # tokens as sampled, never decoded and encoded again


def test_refusals_with_a_hint_are_retried_in_the_same_session():
    script = [(429, {"Retry-After": "0"}, "full"), (409, {"Retry-After": "0"}, "version"), answer(11), answer(12)]
    sample, asked, _ = play(script)
    assert sample.status == Sample.Status.COMPLETED and len(asked) == 4


def test_a_lost_pool_aborts_the_sample_and_names_it():
    sample, _, ended = play([answer(11), (503, {}, "pool fp8 has no usable engine")])
    assert sample.status == Sample.Status.ABORTED
    assert sample.metadata["mixprec"]["pool"] == "fp8" and "no usable engine" in sample.metadata["mixprec"]["lost"]
    assert ended == ["run-7"]


def test_a_session_that_changes_pool_is_never_trained_on():
    moved = {**answer(12), "headers": {"X-Mixprec-Pool": "bf16"}}
    sample, _, _ = play([answer(11), moved])
    assert sample.status == Sample.Status.ABORTED
    assert "moved from pool fp8 to bf16" in sample.metadata["mixprec"]["lost"]


def test_a_reply_that_contradicts_itself_aborts_the_sample():
    wrong = answer(11)
    wrong["meta_info"]["output_token_sampling_mask"] = [[500, 501]]
    sample, _, _ = play([wrong])
    assert (
        sample.status == Sample.Status.ABORTED
        and "sampled token 11 occurs 0 times" in sample.metadata["mixprec"]["lost"]
    )


def test_an_engine_without_the_data_stops_the_run():
    bare = answer(11)
    del bare["meta_info"]["output_token_sampling_mask"]
    with pytest.raises(CapabilityError, match="pool fp8"):
        play([bare])


def test_an_aborted_turn_aborts_the_sample():
    """It comes without the data that was asked for, and says nothing about the engine's abilities."""
    aborted = answer(11, finish="abort")
    del aborted["meta_info"]["output_token_sampling_mask"]
    sample, _, _ = play([aborted])
    assert sample.status == Sample.Status.ABORTED
    assert sample.metadata["mixprec"] == {"lost": "engine fp8/0 aborted the turn", "pool": "fp8"}


def test_a_router_that_does_not_answer_in_time_aborts_the_sample():
    sample, _, _ = play([answer(11) | {"delay": 0.5}], **{"router.request_timeout_s": 0.1})
    assert sample.status == Sample.Status.ABORTED and "TimeoutError" in sample.metadata["mixprec"]["lost"]


def test_a_prompt_without_room_for_a_reply_says_so():
    sample, asked, _ = play([], **{"fleet.context_length": 3})
    assert sample.status == Sample.Status.ABORTED and not asked
    assert sample.metadata["mixprec"]["lost"] == "a prompt of 2 tokens leaves no room; raise fleet.context_length"


def test_an_answer_past_the_router_is_no_turn():
    sample, _, _ = play([(200, {}, '{"meta_info": {}}')])
    assert sample.status == Sample.Status.ABORTED and "does not say which pool" in sample.metadata["mixprec"]["lost"]


def test_repeated_format_errors_end_the_episode_and_are_noted():
    sample, _, _ = play([answer(13), answer(13)])
    note = sample.metadata["mixprec"]
    assert sample.reward == 0.0 and note["format_errors"] == 2 and note["ended_on_format_error"]


def test_turn_and_length_limits_are_noted():
    sample, asked, _ = play([answer(11), answer(11), answer(11), answer(11)], label="9")
    assert len(asked) == 4 and sample.status == Sample.Status.COMPLETED
    sample, _, _ = play([answer(11, finish="length"), answer(12)])
    assert sample.status == Sample.Status.TRUNCATED and sample.metadata["mixprec"]["length_capped"]
    sample, asked, _ = play([answer(11)], **{"fleet.context_length": 5})
    assert len(asked) == 1 and sample.status == Sample.Status.TRUNCATED  # no room for a second turn


def test_evaluation_plays_on_a_bf16_engine_with_the_full_vocabulary():
    sample, asked, ended = play([answer(11), answer(12)], evaluation=True)
    assert sample.tokens == [1, 2, 11, 98, 12] and sample.reward == 1.0 and sample.weight_versions == ["4", "4"]
    assert sample.status == Sample.Status.COMPLETED and RECORD not in vars(sample)
    assert [(key, body["sampling_params"]["top_p"], body["sampling_params"]["top_k"]) for key, body in asked] == [
        (None, 1.0, -1)
    ] * 2
    assert not any("return_sampling_mask" in body for _, body in asked) and ended == []


def test_an_engine_that_fails_an_evaluation_is_named():
    with pytest.raises(EngineError, match=r"http://.* answered 500: broken"):
        play([(500, {}, "broken")], evaluation=True)
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:1.* does not answer"):
        play([], evaluation=True, workers=[{"url": "http://127.0.0.1:1", "view": "bf16"}])


def test_evaluation_without_a_bf16_engine_is_refused():
    with pytest.raises(EngineError, match="evaluation needs a BF16 engine"):
        play([], evaluation=True, workers=[{"url": "http://x", "view": "fp8"}])


@pytest.mark.parametrize(
    ("path", "says"), [(None, "is not set"), ("nope", "must be importable"), ("math.nope", "nope")]
)
def test_names_that_lead_nowhere_are_refused(path, says):
    with pytest.raises(ConfigError, match=rf"rollout\.environment.*{says}"):
        load_named("rollout.environment", path)
