from pathlib import Path

import pytest

from miles_mixprec.config import Config, from_file, from_mapping, load, load_fleet, to_mapping
from miles_mixprec.errors import ConfigError

RUN = ["run_dir=r", "run_id=a", "updates=3", "prompts_per_update=2", "weights.store=s", "fleet.model=m"]


def test_composes_and_survives_plain_data() -> None:
    config = load("config", ["fleet=article_mixed", "algo=sc_mis", *RUN])
    assert isinstance(config, Config)
    assert config.fleet.views == ("fp8", "nvfp4", "bf16")
    assert config.algo.head == 128
    assert from_mapping(to_mapping(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [],
            r"^no value for fleet\.model, prompts_per_update, run_dir, run_id, updates, .*; set fleet\.model=\.\.\. ",
        ),
        ([*RUN, "updates=0"], r"^updates=0: must be at least 1$"),
        ([*RUN, "weights.keep_versions=0"], r"^weights\.keep_versions=0: must be at least 1$"),
        ([*RUN, "router.max_attempts=0"], r"^router\.max_attempts=0: must be at least 1$"),
        ([*RUN, "nonsense=1"], "nonsense"),
        ([*RUN, "fleet=nonsense"], "nonsense"),
        ([*RUN, "fleet.pools.bf16.engines=many"], "many"),
        ([*RUN, "fleet.pools.bf16.view=fp6"], r"fleet\.pools\.bf16\.view=fp6: use one of bf16, fp8"),
        ([*RUN, "fleet.pools.bf16.execution=fast"], "execution=fast: use one of native, dequantized"),
        ([*RUN, "fleet.pools.bf16.engines=0"], r"zero capacity \(engines=0, slots_per_engine=12\)"),
        ([*RUN, "fleet.pools.bf16.min_engines=2"], r"min_engines=2: must lie in 0\.\.engines=1"),
        ([*RUN, "fleet.pools.bf16.max_engines=0"], "max_engines=0: must be at least engines=1"),
        ([*RUN, "fleet.pools.bf16.accelerators_per_engine=0"], "accelerators_per_engine=0: must be at least 1"),
        ([*RUN, "fleet.pools.bf16.max_share=0"], r"max_share=0\.0: must lie in \(0, 1\]"),
        ([*RUN, "fleet.provider=slurm"], "fleet.provider=slurm: use one of static, local, ray, modal"),
        ([*RUN, "fleet.provider=static"], "provider static needs one URL per engine, got 0 for 1"),
        (
            [*RUN, "fleet.pools.bf16.accelerator=h100", "fleet.pools.bf16.view=nvfp4"],
            "h100 executes bf16, fp8, not nvfp4",
        ),
        ([*RUN, "algo.weights=ppo"], r"algo\.weights=ppo: use one of none, tis, mis, is"),
        ([*RUN, "algo.bounds=[5,1]"], r"algo\.bounds=\[5\.0, 1\.0\]: need \[low, high\]"),
        ([*RUN, "+algo.bounds_by_view.mxfp4=[0.5,5]"], "no pool of fleet cpu_quickstart serves that view"),
        ([*RUN, "algo.temperature=0"], r"algo\.temperature=0\.0: must be finite and above 0"),
        ([*RUN, "algo.top_p=0"], r"algo\.top_p=0\.0: must lie in \(0, 1\]"),
        ([*RUN, "algo.top_k=-1"], r"needs a finite algo\.top_k in 2\.\.4096 \(got -1\)"),
        ([*RUN, "algo=sc", "algo.head=1"], r"algo\.head=1: score centering without top-p needs a recorded head"),
        ([*RUN, "router.gate=latest"], r"router\.gate=latest: use one of newest, min, bounded, any"),
    ],
)
def test_refuses_in_one_line(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load("config", overrides)
    assert "\n" not in str(error.value)


def test_pool_names_are_checked() -> None:
    values = to_mapping(load("config", RUN))
    values["fleet"]["pools"] = {"Bad": values["fleet"]["pools"]["bf16"]}
    with pytest.raises(ConfigError, match=r"^fleet\.pools\.Bad: a pool's name is 1-40 of a-z 0-9 _ - "):
        from_mapping(values)


def test_a_fleet_needs_no_run() -> None:
    assert load_fleet(["fleet=cpu_quickstart", "fleet.model=m"]).slots == 52
    with pytest.raises(ConfigError, match=r"^no value for fleet\.model; set fleet\.model=\.\.\.$"):
        load_fleet(["fleet=cpu_quickstart"])


def test_own_directories_find_the_shipped_fleets(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [schema, {fleet: article_homogeneous}, _self_]\n")
    assert load_fleet(name="mine", conf_dir=tmp_path).slots == 1344


def test_a_file_that_holds_no_configuration_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match=r"No such file.*; give a run's config\.yaml$"):
        from_file(path)
    for text in ("[1, 2]", "a: b: c"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"config\.yaml: .*; give a run's config\.yaml$") as error:
            from_file(path)
        assert "\n" not in str(error.value)
