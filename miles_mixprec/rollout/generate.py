"""Miles' `--custom-generate-function-path`: multi-turn episodes, token in and token out, through the router.

The policy's reply goes to `rollout.environment`, whose observation is appended as it is, and so on until the
environment, the turn limit or the context length ends the episode. Tokens are never decoded and encoded again, so the
trainer sees exactly what the sampler saw.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import zlib
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

from miles_mixprec import config as configuration
from miles_mixprec.config import Algo, Config
from miles_mixprec.errors import ConfigError, ContractError, EngineError, PoolUnavailable
from miles_mixprec.rollout.capture import Trajectory, read_reply, request_body
from miles_mixprec.rollout.client import RouterClient
from miles_mixprec.rollout.environment import Environment

RECORD = "mixprec_record"  # attribute of a Miles Sample that holds its SamplerRecord


@dataclass
class Episode:
    """How an episode went, besides its tokens."""

    turns: int = 0
    format_errors: int = 0
    ended_on_format_error: bool = False
    length_capped: bool = False
    lost: str = ""  # why the episode cannot be trained on


@dataclass
class Setup:
    """What every episode of a process shares."""

    config: Config
    tokenizer: Any
    environment: type[Environment]
    router_url: str
    clients: dict[asyncio.AbstractEventLoop, RouterClient] = field(default_factory=dict)

    def client(self) -> RouterClient:
        loop = asyncio.get_running_loop()
        if loop not in self.clients:
            token = self.config.router.client_token_env
            self.clients[loop] = RouterClient(
                self.router_url,
                timeout_s=self.config.router.request_timeout_s,
                token=os.environ[token] if token else None,
            )
        return self.clients[loop]


async def generate(args: Namespace, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
    """Run one episode for a Miles `Sample` and return it filled.

    A session whose pool is lost, or whose reply breaks a contract, comes back ABORTED: Miles drops or retries its
    group. Raises ConfigError for flags that contradict the configuration, CapabilityError for engines that leave data
    out.
    """
    setup = _setup(args)
    if evaluation:
        return await _evaluate(setup, sample, sampling_params)
    key = f"{setup.config.run_id}-{sample.index}"
    client = setup.client()
    try:
        trajectory, environment, episode = await _episode(setup, client, key, sample, sampling_params)
    finally:
        await client.end(key)
    if trajectory is None or episode.lost:
        sample.metadata["mixprec"] = {"lost": episode.lost, "pool": trajectory.pool if trajectory else None}
        sample.status = type(sample).Status.ABORTED
        return sample
    return _fill(setup, sample, trajectory, environment, episode)


async def _episode(
    setup: Setup, client: RouterClient, key: str, sample: Any, sampling_params: dict[str, Any]
) -> tuple[Trajectory | None, Environment, Episode]:
    algo, episode = setup.config.algo, Episode()
    environment = setup.environment.from_sample(sample.prompt, sample.label, sample.metadata)
    prompt = setup.tokenizer.encode(sample.prompt, add_special_tokens=False)
    trajectory: Trajectory | None = None
    while True:
        context = prompt + (trajectory.ids if trajectory else [])
        room = _room(setup.config, sampling_params, len(context))
        if room < 1:
            episode.length_capped = True
            return trajectory, environment, episode
        body = request_body(algo, context, {**sampling_params, "max_new_tokens": room})
        try:
            answer, served = await client.generate(key, body)
            reply = read_reply(algo, answer, pool=served.pool)
            if trajectory is not None and served.pool != trajectory.pool:
                raise ContractError(f"session {key} moved from pool {trajectory.pool} to {served.pool}")
        except (PoolUnavailable, EngineError, ContractError) as error:
            episode.lost = str(error)
            return trajectory, environment, episode
        if trajectory is None:
            trajectory = Trajectory(algo, served.pool, served.view)
        trajectory.add_reply(served.engine, reply)
        episode.turns += 1
        if reply.finish_reason == "abort":
            episode.lost = f"engine {served.engine} aborted the turn"
            return trajectory, environment, episode
        if _advance(setup, trajectory, environment, episode, reply):
            return trajectory, environment, episode


def _advance(setup: Setup, trajectory: Any, environment: Environment, episode: Episode, reply: Any) -> bool:
    """Give the reply to the environment and append its observation; True when the episode is over."""
    episode.length_capped |= reply.finish_reason == "length"
    step = environment.step(setup.tokenizer.decode(reply.ids.tolist()))
    episode.format_errors += step.format_error
    episode.ended_on_format_error = step.done and step.format_error
    if step.done or episode.turns >= setup.config.rollout.max_turns:
        return True
    if step.observation:
        trajectory.add_observation(setup.tokenizer.encode(step.observation, add_special_tokens=False))
    return False


def _room(config: Config, sampling_params: dict[str, Any], used: int) -> int:
    """Tokens that the next turn may have."""
    return min(
        config.rollout.max_tokens_per_turn,
        sampling_params.get("max_new_tokens") or config.rollout.max_tokens_per_turn,
        config.fleet.context_length - used - 1,
    )


def _fill(setup: Setup, sample: Any, trajectory: Trajectory, environment: Environment, episode: Episode) -> Any:
    record = trajectory.record()
    sample.tokens = setup.tokenizer.encode(sample.prompt, add_special_tokens=False) + trajectory.ids
    sample.response_length = len(trajectory.ids)
    sample.response = setup.tokenizer.decode(trajectory.ids)
    sample.loss_mask = trajectory.loss_mask
    sample.rollout_log_probs = trajectory.log_probs().tolist()
    sample.weight_versions = [str(turn["weight_version"]) for turn in record.attribution()]
    sample.reward = environment.grade()
    sample.status = type(sample).Status.TRUNCATED if episode.length_capped else type(sample).Status.COMPLETED
    sample.metadata["mixprec"] = {
        "pool": record.pool,
        "view": record.view,
        "turns": record.attribution(),
        "format_errors": episode.format_errors,
        "ended_on_format_error": episode.ended_on_format_error,
        "length_capped": episode.length_capped,
    }
    setattr(sample, RECORD, record)
    return sample


async def _evaluate(setup: Setup, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """The same episode on a BF16 engine, with the full vocabulary and nothing recorded."""
    client = setup.client()
    engines = await client.engines("bf16")
    if not engines:
        raise EngineError(
            "evaluation needs a BF16 engine and no pool of the fleet has one; add a pool with view: bf16"
        )
    engine = engines[zlib.crc32(f"{sample.index}".encode()) % len(engines)]
    algo = Algo(name="evaluation", temperature=sampling_params["temperature"])
    environment = setup.environment.from_sample(sample.prompt, sample.label, sample.metadata)
    prompt, episode = setup.tokenizer.encode(sample.prompt, add_special_tokens=False), Episode()
    trajectory = Trajectory(algo, "evaluation", "bf16")
    while (room := _room(setup.config, sampling_params, len(prompt) + len(trajectory.ids))) > 0:
        params = {**sampling_params, "max_new_tokens": room, "top_p": 1.0, "top_k": -1}
        answer = await client.direct(engine, request_body(algo, prompt + trajectory.ids, params))
        reply = read_reply(algo, answer, pool=engine)
        trajectory.add_reply(engine, reply)
        episode.turns += 1
        if _advance(setup, trajectory, environment, episode, reply):
            break
    sample.tokens, sample.response_length = prompt + trajectory.ids, len(trajectory.ids)
    sample.response, sample.loss_mask = setup.tokenizer.decode(trajectory.ids), trajectory.loss_mask
    sample.weight_versions = [str(reply.versions[0]) for _, _, reply in trajectory.turns]
    sample.reward = environment.grade()
    sample.status = type(sample).Status.COMPLETED
    return sample


_setups: dict[int, Setup] = {}  # by identity of Miles' args, of which a process has one


def _setup(args: Namespace) -> Setup:
    if id(args) not in _setups:
        from transformers import AutoTokenizer

        config = configuration.from_args(args)
        _setups[id(args)] = Setup(
            config,
            AutoTokenizer.from_pretrained(args.hf_checkpoint),
            load_named("rollout.environment", config.rollout.environment),
            f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        )
    return _setups[id(args)]


def load_named(key: str, path: str | None) -> Any:
    """What the configuration's `key` names as "pkg.mod.name". Raises ConfigError."""
    if path is None:
        raise ConfigError(f"{key} is not set; name the object to use, e.g. {key}=pkg.mod.name")
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{key}={path}: {error}; it must be importable in the rollout manager") from error
