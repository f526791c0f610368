"""Miles' `--custom-generate-function-path`: multi-turn episodes, token in and token out, through the router.

The policy's reply goes to `rollout.environment`, whose observation is appended as it is, and so on until the
environment, the turn limit or the context length ends the episode. Tokens are never decoded and encoded again, so the
trainer sees exactly what the sampler saw.
"""

from __future__ import annotations

import asyncio
import importlib
import zlib
from argparse import Namespace
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from miles_mixprec import config as configuration
from miles_mixprec.config import Algo, Config
from miles_mixprec.errors import ConfigError, ContractError, EngineError, PoolUnavailable
from miles_mixprec.rollout.capture import Reply, Trajectory, read_reply, request_body
from miles_mixprec.rollout.client import Attribution, RouterClient
from miles_mixprec.rollout.environment import Environment

RECORD = "mixprec_record"  # attribute of a Miles Sample that holds its SamplerRecord
Ask = Callable[[dict[str, Any]], Awaitable[tuple[dict[str, Any], Attribution]]]  # request body -> reply, and whose


@dataclass
class Episode:
    """One episode: its tokens, and how it went."""

    environment: Environment
    prompt: list[int]
    trajectory: Trajectory | None = None  # from the first reply on
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
            self.clients[loop] = RouterClient(self.router_url, self.config.router)
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
    client, key = setup.client(), f"{setup.config.run_id}-{sample.index}"
    try:
        episode = await _play(
            setup, setup.config.algo, sample, sampling_params, lambda body: client.generate(key, body)
        )
    finally:
        await client.end(key)
    trajectory = episode.trajectory
    if trajectory is None or episode.lost:
        lost = episode.lost or f"a prompt of {len(episode.prompt)} tokens leaves no room; raise fleet.context_length"
        abort(sample, lost, trajectory.pool if trajectory else None)
        return sample
    _fill(setup, sample, episode, trajectory)
    sample.status = type(sample).Status.TRUNCATED if episode.length_capped else type(sample).Status.COMPLETED
    attach(sample, trajectory, episode.format_errors, episode.ended_on_format_error, episode.length_capped)
    return sample


def attach(
    sample: Any, trajectory: Trajectory, format_errors: int, ended_on_format_error: bool, length_capped: bool
) -> None:
    """Put on the sample what the trainer and the log hooks read."""
    record = trajectory.record()
    setattr(sample, RECORD, record)
    sample.rollout_log_probs = trajectory.log_probs().tolist()
    sample.metadata["mixprec"] = {
        "pool": record.pool,
        "view": record.view,
        "turns": record.attribution(),
        "format_errors": format_errors,
        "ended_on_format_error": ended_on_format_error,
        "length_capped": length_capped,
    }


def abort(sample: Any, lost: str, pool: str | None) -> None:
    """Mark the sample as one that Miles drops or retries, and say why."""
    sample.metadata["mixprec"] = {"lost": lost, "pool": pool}
    sample.status = type(sample).Status.ABORTED


async def _evaluate(setup: Setup, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """The same episode on a BF16 engine, with the full vocabulary and nothing recorded. Raises EngineError."""
    client = setup.client()
    engines = await client.engines("bf16")
    if not engines:
        raise EngineError(
            "evaluation needs a BF16 engine and no pool of the fleet has one; add a pool with view: bf16"
        )
    engine = engines[zlib.crc32(f"{sample.index}".encode()) % len(engines)]
    algo = Algo(name="evaluation", temperature=sampling_params["temperature"])

    async def ask(body: dict[str, Any]) -> tuple[dict[str, Any], Attribution]:
        return await client.direct(engine, body), Attribution(engine, engine, "bf16")

    episode = await _play(setup, algo, sample, {**sampling_params, "top_p": 1.0, "top_k": -1}, ask)
    if episode.lost:
        raise EngineError(episode.lost)
    _fill(setup, sample, episode, episode.trajectory or Trajectory(algo, engine, "bf16"))
    sample.status = type(sample).Status.COMPLETED
    return sample


async def _play(setup: Setup, algo: Algo, sample: Any, sampling_params: dict[str, Any], ask: Ask) -> Episode:
    """Turns until the environment, the turn limit or the context length ends the episode, or it is lost."""
    limits = setup.config.rollout
    environment = setup.environment.from_sample(sample.prompt, sample.label, sample.metadata)
    episode = Episode(environment, setup.tokenizer.encode(sample.prompt, add_special_tokens=False))
    longest = min(limits.max_tokens_per_turn, sampling_params.get("max_new_tokens") or limits.max_tokens_per_turn)
    while True:
        context = episode.prompt + (episode.trajectory.ids if episode.trajectory else [])
        room = min(longest, setup.config.fleet.context_length - len(context) - 1)
        if room < 1:
            episode.length_capped = True
            return episode
        body = request_body(algo, context, {**sampling_params, "max_new_tokens": room})
        try:
            answer, served = await ask(body)
            trajectory = episode.trajectory = episode.trajectory or Trajectory(algo, served.pool, served.view)
            reply = _take(trajectory, answer, served)
        except (PoolUnavailable, EngineError, ContractError) as error:
            episode.lost = str(error)
            return episode
        if _advance(setup, episode, trajectory, reply):
            return episode


def _take(trajectory: Trajectory, answer: dict[str, Any], served: Attribution) -> Reply:
    """Add the answer to the trajectory. Raises EngineError, CapabilityError or ContractError."""
    if served.pool != trajectory.pool:
        raise ContractError(f"the session moved from pool {trajectory.pool} to {served.pool}")
    # An aborted turn lacks what was to be recorded, which is not the engine's fault.
    if (answer["meta_info"].get("finish_reason") or {}).get("type") == "abort":
        raise EngineError(f"engine {served.engine} aborted the turn")
    reply = read_reply(trajectory.algo, answer, pool=served.pool)
    trajectory.add_reply(served.engine, reply)
    return reply


def _advance(setup: Setup, episode: Episode, trajectory: Trajectory, reply: Reply) -> bool:
    """Give the reply to the environment and append its observation; True when the episode is over."""
    episode.length_capped |= reply.finish_reason == "length"
    step = episode.environment.step(setup.tokenizer.decode(reply.ids.tolist()))
    episode.format_errors += step.format_error
    episode.ended_on_format_error = step.done and step.format_error
    if step.done or len(trajectory.turns) >= setup.config.rollout.max_turns:
        return True
    if step.observation:
        trajectory.add_observation(setup.tokenizer.encode(step.observation, add_special_tokens=False))
    return False


def _fill(setup: Setup, sample: Any, episode: Episode, trajectory: Trajectory) -> None:
    """Put what training and evaluation both need on the sample."""
    sample.tokens = episode.prompt + trajectory.ids
    sample.response_length = len(trajectory.ids)
    sample.response = setup.tokenizer.decode(trajectory.ids)
    sample.loss_mask = trajectory.loss_mask
    sample.weight_versions = [str(reply.versions[0]) for _, _, reply in trajectory.turns if len(reply.ids)]
    sample.reward = episode.environment.grade()


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
