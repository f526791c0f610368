"""Agents that speak OpenAI chat through Miles' session server, with the sampler's data captured on the way.

`--custom-generate-function-path miles_mixprec.rollout.agentic.generate` wraps Miles' own agentic generate function and
`--custom-agent-function-path miles_mixprec.rollout.agentic.agent` wraps the user's (`rollout.agent=pkg.mod.fn`). The
agent gets the extra request fields in `request_kwargs` and must send all of them (the OpenAI client's `extra_body`);
what the engines recorded is read from the session server, which keeps every reply whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from miles_mixprec import config as configuration
from miles_mixprec import miles
from miles_mixprec.config import Algo, Config
from miles_mixprec.errors import ConfigError, ContractError, EngineError
from miles_mixprec.headers import SESSION, authorization
from miles_mixprec.rollout.capture import Reply, Trajectory, read_reply, request_body
from miles_mixprec.rollout.client import RouterClient
from miles_mixprec.rollout.generate import abort, attach, load_named

_OPENAI = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_ONLY_NATIVE = ("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


@dataclass
class Capture:
    """One episode's records, from the agent's wrapper to the generate function's."""

    config: Config
    sampling_params: Mapping[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)  # the session server's
    session: dict[str, Any] = field(default_factory=dict)  # the router's
    failure: Exception | None = None  # what the agent raised, which Miles only logs


_capture: ContextVar[Capture] = ContextVar("capture")


async def generate(input: Any) -> Any:
    """Miles' agentic generate with every sample's record attached. An episode without a usable record is ABORTED.

    Raises ConfigError.
    """
    capture = Capture(configuration.from_args(input.args), input.sampling_params)
    token = _capture.set(capture)
    try:
        output = await miles.agentic_generate(input)
    finally:
        _capture.reset(token)
    if isinstance(capture.failure, ConfigError):
        raise capture.failure
    sample = output.samples
    if isinstance(sample, list):
        raise ConfigError("several samples per session are not captured; use session server v1 with merged samples")
    try:
        if capture.failure is not None:
            raise ContractError(f"the agent failed: {type(capture.failure).__name__}: {capture.failure}")
        if sample.status == type(sample).Status.ABORTED:
            raise ContractError("the agent's session yielded no sample")
        trajectory = align(sample, capture)
    except ContractError as error:
        abort(sample, str(error), capture.session.get("pool"))
    else:
        errors = sample.metadata.get("format_errors", 0), sample.metadata.get("ended_on_format_error", False)
        attach(sample, trajectory, int(errors[0]), bool(errors[1]), sample.status == type(sample).Status.TRUNCATED)
    return output


async def agent(base_url: str, request_kwargs: dict[str, Any], **rest: Any) -> Any:
    """Run the user's agent with the arm's request fields, then fetch what the session server and router recorded."""
    capture = _capture.get()
    try:
        return await _captured(capture, base_url, request_kwargs, rest)
    except Exception as error:
        capture.failure = error
        raise


async def _captured(
    capture: Capture, base_url: str, request_kwargs: Mapping[str, Any], rest: Mapping[str, Any]
) -> Any:
    router, key = capture.config.router, session_key(base_url)
    function = load_named("rollout.agent", capture.config.rollout.agent)
    fields = chat_fields(capture.config.algo, capture.sampling_params)
    fields["extra_headers"] = {SESSION: key, **authorization(router)}
    client = RouterClient(f"http://{router.host}:{router.port}", router)
    try:
        result = await function(base_url=base_url, request_kwargs={**request_kwargs, **fields}, **rest)
        capture.session = await client.session(key)
        capture.records = await _session_records(base_url, key)
    finally:
        await client.end(key)
        await client.close()
    return result


def chat_fields(algo: Algo, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat request carries so that it samples and records as `/generate` would. Raises ConfigError."""
    body = request_body(algo, [], {key: sampling_params[key] for key in sampling_params if key not in _ONLY_NATIVE})
    fields = {_OPENAI.get(key, key): value for key, value in body.pop("sampling_params").items() if value is not None}
    del body["input_ids"], body["return_logprob"]
    head = {"top_logprobs": body.pop("top_logprobs_num")} if "top_logprobs_num" in body else {}
    return fields | body | head | {"logprobs": True, "return_meta_info": True}


def session_key(base_url: str) -> str:
    """The session id in `http://host:port/sessions/<id>[/v1]`. Raises ConfigError."""
    _, found, rest = base_url.partition("/sessions/")
    if not found:
        raise ConfigError(f"{base_url} is not a session of Miles' session server; pass --use-session-server")
    return rest.split("/")[0]


async def _session_records(base_url: str, key: str) -> list[dict[str, Any]]:
    session_url = base_url.removesuffix("/").removesuffix("/v1")
    async with aiohttp.ClientSession() as http, http.get(session_url) as reply:
        if reply.status != 200:
            raise EngineError(f"session {key}: the session server answers {reply.status}")
        return (await reply.json())["records"]


def align(sample: Any, capture: Capture) -> Trajectory:
    """The trajectory that `capture` recorded, aligned to the sample's tokens. Raises ContractError if they differ."""
    pool, view = capture.session["pool"], capture.session["view"]
    turns = [record for record in capture.records if record["status_code"] == 200]
    engines = turn_engines(capture.session, len(turns))
    algo = capture.config.algo
    trajectory = Trajectory(algo, pool, view)
    first = len(sample.tokens) - sample.response_length
    response = sample.tokens[first:]
    for engine, turn in zip(engines, turns, strict=True):
        start = len(turn["request"]["input_ids"]) - first
        if start < len(trajectory.ids):
            raise ContractError(f"pool {pool}: a turn starts inside the one before it; the history was rewritten")
        trajectory.add_observation(response[len(trajectory.ids) : start])
        if len(trajectory.ids) == len(response):
            break  # this and later turns were cut off at the sample's maximum length
        reply = read_reply(algo, turn["response"]["choices"][0], pool=pool)
        trajectory.add_reply(engine, reply, kept(reply, response[start:]))
    trajectory.add_observation(response[len(trajectory.ids) :])
    if trajectory.ids != list(response):
        raise ContractError(f"pool {pool}: the merged sample is not the concatenation of its turns; drop it")
    return trajectory


def turn_engines(session: Mapping[str, Any], turns: int) -> list[str]:
    """The engine of each turn that the session server kept; it forgets turns that the agent took back.

    Raises ContractError where that leaves open which engine served which turn.
    """
    engines = [turn["engine"] for turn in session["turns"]]
    if len(engines) == turns:
        return engines
    if len(set(engines)) == 1 and len(engines) > turns:
        return engines[:turns]
    raise ContractError(
        f"pool {session['pool']}: the router served {len(engines)} turns on {', '.join(sorted(set(engines)))}, "
        f"the session server kept {turns}; drop the sample"
    )


def kept(reply: Reply, tokens: Sequence[int]) -> int:
    """How many tokens of `reply` the merge kept; those at the end may be rendered by the next turn's template."""
    differ = (i for i, (mine, merged) in enumerate(zip(reply.ids, tokens, strict=False)) if mine != merged)
    return next(differ, min(len(reply.ids), len(tokens)))
