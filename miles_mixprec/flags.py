"""The Miles command line of a configuration, and the two files that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from miles_mixprec.config import Config, to_mapping
from miles_mixprec.errors import ConfigError
from miles_mixprec.fleet.arguments import words

CONFIG_FILE = "miles_config.yaml"
PLACEHOLDER_FILE = "sglang_config.yaml"


def miles_flags(config: Config, *, generation: str | None = None) -> list[str]:
    """Every Miles flag of this run, as words of a command line.

    `generation` is "0.0.2" or "0.1"; None asks the installed Miles. The files that the flags name are written by
    `write_files`. Raises ConfigError for flags in `miles_args` that the integration owns and for an open router port.
    """
    if generation is None:
        from miles_mixprec.miles import features

        generation = features().generation
    if config.router.port == 0:
        raise ConfigError("router.port=0: Miles needs the router's address beforehand; set router.port to a free port")
    owned = integration(config)
    for key in config.miles_args:
        if key in owned:
            raise ConfigError(f"miles_args.{key}: set by the integration; remove it")
    values = {**owned, **_recipe(config, generation), **config.miles_args}
    return [word for key, value in values.items() for word in words(key, value)]


def write_files(config: Config) -> None:
    """Write the files that `miles_flags` names into the run directory."""
    directory = Path(config.run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(
        yaml.safe_dump({**config.miles_config, "mixprec": to_mapping(config)}, sort_keys=False)
    )
    group = {"worker_type": "placeholder", "num_gpus": 1}
    model = {"name": "default", "server_groups": [group]}
    (directory / PLACEHOLDER_FILE).write_text(yaml.safe_dump({"sglang": [model]}, sort_keys=False))


def integration(config: Config) -> dict[str, Any]:
    """Where the package enters Miles. A user's value for one of these flags would switch a part of it off."""
    directory = Path(config.run_dir)
    generate, agent = "miles_mixprec.rollout.generate.generate", None
    if config.rollout.agent is not None:
        generate, agent = "miles_mixprec.rollout.agentic.generate", "miles_mixprec.rollout.agentic.agent"
    return {
        "loss-type": "custom_loss",
        "custom-loss-function-path": "miles_mixprec.loss.policy.policy_loss",
        "custom-generate-function-path": generate,
        "custom-agent-function-path": agent,
        "custom-convert-samples-to-train-data-path": "miles_mixprec.miles.convert_samples",
        "custom-megatron-init-path": "miles_mixprec.miles.megatron_init",
        "custom-rollout-log-function-path": "miles_mixprec.rollout.log.log_rollout",
        "custom-eval-rollout-log-function-path": "miles_mixprec.rollout.log.log_eval",
        "custom-config-path": directory / CONFIG_FILE,
        # Engines are not Miles': it sees an ordinary router and a group that launches nothing.
        "sglang-config": directory / PLACEHOLDER_FILE,
        "sglang-router-ip": config.router.host,
        "sglang-router-port": config.router.port,
        "rollout-num-gpus": 1,
        "rollout-num-gpus-per-engine": 1,
    }


def _recipe(config: Config, generation: str) -> dict[str, Any]:
    """What the estimator assumes: one optimizer step per batch, the sampler's log-probs as baseline, no clipping."""
    algo = config.algo
    newer = generation == "0.1"
    return {
        "use-miles-router": True,
        "sglang-server-concurrency": config.fleet.slots,
        "use-session-server": config.rollout.agent is not None,
        "fully-async": newer,
        "rollout-function-path": None if newer else "miles_mixprec.miles.generate_rollout",
        "hf-checkpoint": config.fleet.model,
        "num-rollout": config.updates,
        "rollout-batch-size": config.prompts_per_update,
        "n-samples-per-prompt": config.samples_per_prompt,
        "global-batch-size": config.prompts_per_update * config.samples_per_prompt,
        "rollout-temperature": algo.temperature,
        "rollout-top-p": algo.top_p,
        "rollout-top-k": algo.top_k,
        "rollout-max-response-len": config.rollout.max_tokens_per_turn,
        "advantage-estimator": "grpo",
        "disable-grpo-std-normalization": not algo.std_normalization,
        "calculate-per-token-loss": algo.token_mean,
        "use-rollout-logprobs": True,
        "kl-coef": 0,
        "use-kl-loss": algo.kl_coef > 0,
        "kl-loss-coef": algo.kl_coef,
        "entropy-coef": 0,
        "lr": config.learning_rate,
        "seed": config.seed,
        "rollout-seed": config.seed,
    }
