"""The flags are the integration: Miles' own parser takes them, and none of ours can be switched off by accident."""

import pytest
import yaml

from miles_mixprec import config as configuration
from miles_mixprec.errors import ConfigError
from miles_mixprec.flags import integration, miles_flags, write_files

KEYS = {
    "run_dir": "RUN",
    "run_id": "r",
    "updates": 3,
    "prompts_per_update": 4,
    "fleet.model": "models/tiny",
    "weights.store": "RUN/store",
    "router.port": 31000,
}


def load(*overrides, run_dir="RUN"):
    values = {**KEYS, "run_dir": run_dir}
    return configuration.load("config", [*(f"{key}={value}" for key, value in values.items()), *overrides])


def as_dict(flags):
    parsed, name = {}, None
    for word in flags:
        if word.startswith("--"):
            name = word[2:]
            parsed[name] = True
        else:
            parsed[name] = word
    return parsed


def test_recipe_of_the_default_arm():
    flags = as_dict(miles_flags(load(), generation="0.0.2"))
    assert flags["rollout-top-p"] == "0.97" and flags["rollout-top-k"] == "64"
    assert (
        flags["disable-grpo-std-normalization"] and flags["calculate-per-token-loss"] and flags["use-rollout-logprobs"]
    )
    assert flags["global-batch-size"] == "32"
    assert flags["sglang-server-concurrency"] == "52"
    assert flags["rollout-function-path"] == "miles_mixprec.miles.generate_rollout"


def test_grpo_keeps_its_normalisation_and_the_newer_miles_its_own_asynchrony():
    flags = as_dict(miles_flags(load("algo=grpo"), generation="0.1"))
    assert "disable-grpo-std-normalization" not in flags and flags["rollout-top-p"] == "1.0"
    assert flags["fully-async"] and "rollout-function-path" not in flags


def test_an_agent_goes_through_the_session_server():
    flags = as_dict(miles_flags(load("rollout.agent=my.agent.run"), generation="0.1"))
    assert flags["use-session-server"]
    assert flags["custom-agent-function-path"] == "miles_mixprec.rollout.agentic.agent"
    assert flags["custom-generate-function-path"] == "miles_mixprec.rollout.agentic.generate"


@pytest.mark.parametrize("flag", integration(load()))
def test_flags_of_the_integration_cannot_be_overridden(flag):
    with pytest.raises(ConfigError, match=rf"miles_args\.{flag}: set by the integration"):
        miles_flags(load(f"+miles_args.{flag}=x"), generation="0.0.2")


def test_the_router_s_port_must_be_known():
    with pytest.raises(ConfigError, match=r"router\.port"):
        miles_flags(load("router.port=0"), generation="0.0.2")


def test_user_flags_follow_and_win_over_the_recipe():
    flags = miles_flags(
        load("+miles_args.lr=0.5", "+miles_args.spec=[a,b]", "+miles_args.swiglu=true"), generation="0.1"
    )
    assert flags.count("--lr") == 1 and flags[flags.index("--lr") + 1] == "0.5"
    assert flags[flags.index("--spec") + 1 :][:2] == ["a", "b"]
    assert "--swiglu" in flags


def test_files_carry_the_tree_and_a_group_that_launches_nothing(tmp_path):
    config = load("+miles_config.bf16=false", run_dir=tmp_path)
    write_files(config)
    carried = yaml.safe_load((tmp_path / "miles_config.yaml").read_text())
    assert carried["bf16"] is False
    assert configuration.from_mapping(carried["mixprec"]) == config
    group = yaml.safe_load((tmp_path / "sglang_config.yaml").read_text())["sglang"][0]["server_groups"][0]
    assert group == {"worker_type": "placeholder", "num_gpus": 1}
