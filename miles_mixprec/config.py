"""The configuration of a mixed-precision run: Hydra structured configs, checked once, carried everywhere.

One tree. `load` composes it from the shipped YAML under `conf/` and Hydra overrides, and refuses what cannot
work. Miles gets it whole, as the `mixprec` key of its `--custom-config-path` file, so every process of a
run (trainer ranks, rollout manager, router, encoders, sidecars) reads the same values.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from miles_mixprec.errors import ConfigError

CONF_DIR = Path(__file__).parent / "conf"
VIEWS = ("bf16", "fp8", "nvfp4", "mxfp8", "mxfp4")
WEIGHT_RULES = ("none", "tis", "mis", "is")
EXECUTIONS = ("native", "dequantized")
PROVIDERS = ("static", "local", "ray", "modal")
GATE_POLICIES = ("newest", "min", "bounded", "any")
GUARD_ACTIONS = ("warn", "quarantine", "save", "stop")
POOL_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,39}")


@dataclass
class Pool:
    """Engines that share one precision, one GPU type and one kernel family. Its key in `fleet.pools` names it."""

    view: str = MISSING  # weight view that it serves: bf16 | fp8 | nvfp4 | mxfp8 | mxfp4
    accelerator: str = "cpu"  # key of fleet.accelerators
    accelerators_per_engine: int = 1  # tensor-parallel size
    engines: int = 1
    slots_per_engine: int = MISSING  # concurrent sessions an engine serves at the latency target
    kv_cache_dtype: str = "auto"
    execution: str = "native"  # "dequantized": encoded to the view's format, decoded to BF16 to run (CPU)
    sglang: dict[str, Any] = field(default_factory=dict)  # further SGLang server arguments, keys as in ServerArgs
    env: dict[str, str] = field(default_factory=dict)
    urls: list[str] = field(default_factory=list)  # provider "static": engines that exist already
    hourly_price: float | None = None  # $ per accelerator-hour; None: the accelerator's list price
    min_engines: int = 0  # the run starts without the rest; late engines join
    max_share: float = 1.0  # cap on the pool's share of new sessions
    max_engines: int | None = None  # how far the pool may grow; None: not beyond `engines`
    cpus: float | None = None  # cores that an engine's container or actor asks for
    memory_gib: int | None = None  # main memory likewise; weight staging needs 1.5 times a checkpoint

    @property
    def slots(self) -> int:
        return self.engines * self.slots_per_engine


@dataclass
class Modal:
    """Provider "modal": the containers of the engines and, unless `router_url` is given, of the router."""

    image: str = "lmsysorg/sglang:v0.5.23"  # with SGLang and a CUDA for every accelerator of the fleet
    packages: str = (
        "hydra-core rich aiohttp uvloop prometheus-client safetensors fsspec xxhash zstandard msgspec scipy"
    )
    router_url: str = ""  # a router that runs elsewhere, as the engines reach it
    private: bool = True  # engines on Modal's private network, in one region; False: each on a public TLS tunnel
    region: str | None = None
    secrets: list[str] = field(default_factory=list)  # names of Modal secrets; the router's tokens among them
    volumes: dict[str, str] = field(default_factory=dict)  # mount path -> Modal volume; the weight store among them
    startup_timeout_s: int = 1800
    ephemeral_disk_gib: int = 512
    memory_limit_gib: int = 512


@dataclass
class Fleet:
    name: str = MISSING
    model: str = MISSING  # Hugging Face directory or hub name of the BF16 model
    context_length: int = MISSING
    provider: str = "local"  # static | local | ray | modal
    pools: dict[str, Pool] = field(default_factory=dict)
    modal: Modal = field(default_factory=Modal)

    @property
    def slots(self) -> int:
        return sum(pool.slots for pool in self.pools.values())

    @property
    def views(self) -> tuple[str, ...]:
        """Views that some pool serves, in the order of the pools."""
        return tuple(dict.fromkeys(pool.view for pool in self.pools.values()))


@dataclass
class Algo:
    """One arm of the estimator; see `miles_mixprec.loss.estimator` for the mathematics."""

    name: str = MISSING
    score_centering: bool = False
    weights: str = "none"  # none | tis | mis | is
    bounds: list[float] = field(default_factory=lambda: [0.5, 5.0])  # band of p/q for mis; [low, cap] for tis
    bounds_by_view: dict[str, list[float]] = field(default_factory=dict)
    head: int = 0  # recorded top-k of the sampler (score centering without a support)
    top_p: float = 1.0
    top_k: int = -1
    temperature: float = 1.0
    std_normalization: bool = False  # divide group advantages by their standard deviation
    token_mean: bool = True  # mean over the tokens of the batch, not per sample
    kl_coef: float = 0.0  # reference KL with its own full-vocabulary score
    contracts: dict[str, str] = field(default_factory=dict)  # check of loss.contracts -> reject | stop

    @property
    def support(self) -> bool:
        """The sampler draws from a truncated support, which is recorded and replayed."""
        return self.top_p < 1.0 or self.top_k > 0


@dataclass
class Router:
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    gate: str = "newest"  # newest | min | bounded | any
    gate_lag: int = 0  # versions, for "bounded"
    gate_wait_s: float = 30.0
    turn_latency_target_s: float = 10.0  # p90
    request_timeout_s: float = 3600.0
    session_active_s: float = 300.0  # a session keeps its slot this long after its last turn
    session_idle_s: float = 7200.0  # and its pin this long
    max_sessions: int = 200_000
    max_attempts: int = 3  # engines of its pool that a turn is sent to
    max_body_mb: int = 256
    poll_s: float = 5.0  # between two looks at an engine
    journal: str | None = None  # file that lets pins outlive the router when there is no Redis
    heartbeat_s: float = 20.0
    redis_url: str | None = None
    client_token_env: str | None = None  # name of the variable that holds the token, never the token
    admin_token_env: str | None = None
    allowed_workers: list[str] = field(default_factory=lambda: ["127.0.0.1", "localhost", "::1"])


@dataclass
class Weights:
    store: str = MISSING  # directory or fsspec URL
    keep_versions: int = 4
    encoders: int = 1  # encoder processes; tensors are sharded over them
    delta: bool = False  # publish what changed instead of whole versions
    anchor_every: int = 10  # with delta: every so many versions is whole
    poll_s: float = 0.5

    @property
    def whole_every(self) -> int:
        """Every so many versions is whole, 0: all of them."""
        return self.anchor_every if self.delta else 0


@dataclass
class Rollout:
    environment: str | None = None  # "pkg.mod.Class": multi-turn environment of the token-level generate hook; or:
    agent: str | None = None  # "pkg.mod.fn": agent for the session-server flow
    max_turns: int = 8
    max_tokens_per_turn: int = 64


@dataclass
class Guard:
    """Limits of `miles_mixprec.guard.collapse`, all against the run's own first updates."""

    enabled: bool = True
    baseline_updates: int = 5  # first updates, that the later ones are compared to
    kl_growth: float = 3.0  # times the start; also one pool's growth over the other pools'
    tail_ratio: float = 3.0  # times the start, or 1 where the start is below
    format_error_share: float = 0.5  # of the episodes that ended well at the start
    length_cap_share: float = 0.5  # likewise, samples at maximum length
    grad_norm_growth: float = 5.0
    reward_fall: float = 0.5  # share of its peak that the reward lost
    patience: int = 3  # updates in a row that a sign must be there
    action: str = "warn"  # warn | quarantine | save | stop; each does what the ones before it do
    stop_after: int = 8  # updates in a row that a collapse must stand: runs with corrections have come back within 6


@dataclass
class Config:
    fleet: Fleet = field(default_factory=Fleet)
    algo: Algo = field(default_factory=Algo)
    router: Router = field(default_factory=Router)
    weights: Weights = field(default_factory=Weights)
    rollout: Rollout = field(default_factory=Rollout)
    guard: Guard = field(default_factory=Guard)
    run_dir: str = MISSING
    run_id: str = MISSING
    seed: int = 0
    updates: int = MISSING
    prompts_per_update: int = MISSING
    samples_per_prompt: int = 8
    learning_rate: float = 1e-6
    miles_args: dict[str, Any] = field(default_factory=dict)  # further Miles flags, keys without "--"
    miles_config: dict[str, Any] = field(default_factory=dict)  # further keys of Miles' --custom-config-path file
    chain: dict[str, str] = field(default_factory=dict)  # user hooks behind ours, e.g. megatron_init: pkg.mod.fn


ConfigStore.instance().store(name="schema", node=Config)


def load(name: str, overrides: Sequence[str] = (), *, conf_dir: Path = CONF_DIR) -> Config:
    """Compose `conf_dir/name.yaml` with Hydra `overrides` and return the validated tree.

    Raises ConfigError, one line, for unknown keys, wrong types, values left out, and combinations that cannot work.
    """
    with _one_line_errors():
        config: Config = _to_object(_compose(name, overrides, conf_dir))
    return _validated(config)


def load_fleet(overrides: Sequence[str] = (), *, name: str = "config", conf_dir: Path = CONF_DIR) -> Fleet:
    """The validated fleet alone, for commands that need no run: `load_fleet(["fleet=article_mixed"])`."""
    with _one_line_errors():
        fleet: Fleet = _to_object(_compose(name, overrides, conf_dir), "fleet")
    _check_fleet(fleet)
    return fleet


def from_mapping(values: Mapping[str, Any]) -> Config:
    """The tree from plain data, as Miles hands it back under `args.mixprec`. Raises ConfigError."""
    with _one_line_errors():
        config: Config = _to_object(OmegaConf.merge(OmegaConf.structured(Config), dict(values)))
    return _validated(config)


def from_file(path: str | Path) -> Config:
    """The tree of a run from its YAML file, bare or under `mixprec` as Miles carries it. Raises ConfigError."""
    try:
        values = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {_one_line(error)}; give a run's config.yaml") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a configuration; give a run's config.yaml")
    return from_mapping(values.get("mixprec", values))


def from_args(args: Namespace) -> Config:
    """The tree that Miles carries in its own arguments. Raises ConfigError if it is not there."""
    values = vars(args).get("mixprec")
    if values is None:
        raise ConfigError(
            "Miles' arguments carry no configuration; pass --custom-config-path (see miles-mixprec flags)"
        )
    return from_mapping(values)


def to_mapping(config: Config) -> dict[str, Any]:
    """Plain data, fit for YAML and for `from_mapping`."""
    return OmegaConf.to_container(OmegaConf.structured(config), resolve=True)  # type: ignore[return-value]


def to_file(config: Config, path: Path) -> Path:
    """Write the whole tree to `path`, for processes that take `--config` and for who asks later how a run ran."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(to_mapping(config), sort_keys=False))
    return path


def _compose(name: str, overrides: Sequence[str], conf_dir: Path) -> Any:
    """A configuration of any directory; the shipped fleets and arms are found from everywhere."""
    shipped = f"hydra.searchpath=[file://{CONF_DIR}]"
    with initialize_config_dir(config_dir=str(conf_dir.resolve()), version_base="1.3"):
        return compose(config_name=name, overrides=[shipped, *overrides])


def _to_object(tree: Any, part: str = "") -> Any:
    """The dataclass of `tree`, or of the `part` of it, in which no value may be missing."""
    missing = sorted(key for key in OmegaConf.missing_keys(tree) if not part or key.startswith(f"{part}."))
    if missing:
        raise ConfigError(f"no value for {', '.join(missing)}; set {' '.join(f'{key}=...' for key in missing)}")
    return OmegaConf.to_object(tree[part] if part else tree)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Hydra's and OmegaConf's errors as ConfigError: the message and, where Hydra wraps the reason, that too."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        texts = [_one_line(each) for each in (error, error.__cause__) if each is not None]
        raise ConfigError(": ".join(dict.fromkeys(texts))) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


_COUNTS = (
    *("updates", "prompts_per_update", "samples_per_prompt"),
    *("guard.baseline_updates", "guard.patience", "guard.stop_after"),
    *("rollout.max_turns", "rollout.max_tokens_per_turn"),
    *("router.max_sessions", "router.max_attempts", "router.max_body_mb"),
    *("weights.keep_versions", "weights.encoders", "weights.anchor_every"),
)


def _validated(config: Config) -> Config:
    """`config` if it can work, else ConfigError naming the key and the remedy."""
    _check_fleet(config.fleet)
    _check_algo(config.algo, config.fleet)
    _one_of("router.gate", config.router.gate, GATE_POLICIES)
    _one_of("guard.action", config.guard.action, GUARD_ACTIONS)
    for key in _COUNTS:
        _at_least_one(key, attrgetter(key)(config))
    return config


def _one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key}={value}: use one of {', '.join(allowed)}")


def _at_least_one(key: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{key}={value}: must be at least 1")


def _check_fleet(fleet: Fleet) -> None:
    from miles_mixprec.fleet.compatibility import require_compatible  # it describes pools, so it imports this module

    _one_of("fleet.provider", fleet.provider, PROVIDERS)
    if not fleet.pools:
        raise ConfigError(f"fleet {fleet.name} has no pools; add at least one under fleet.pools")
    for name, pool in fleet.pools.items():
        where = f"fleet.pools.{name}"
        if not POOL_NAME.fullmatch(name):
            raise ConfigError(f"{where}: a pool's name is 1-40 of a-z 0-9 _ - and starts with a letter or digit")
        _one_of(f"{where}.view", pool.view, VIEWS)
        _one_of(f"{where}.execution", pool.execution, EXECUTIONS)
        _at_least_one(f"{where}.accelerators_per_engine", pool.accelerators_per_engine)
        if pool.engines < 1 or pool.slots_per_engine < 1:
            raise ConfigError(
                f"{where}: zero capacity (engines={pool.engines}, slots_per_engine={pool.slots_per_engine}); "
                "set both to at least 1 or remove the pool"
            )
        if not 0 <= pool.min_engines <= pool.engines:
            raise ConfigError(f"{where}.min_engines={pool.min_engines}: must lie in 0..engines={pool.engines}")
        if pool.max_engines is not None and pool.max_engines < pool.engines:
            raise ConfigError(f"{where}.max_engines={pool.max_engines}: must be at least engines={pool.engines}")
        if not 0 < pool.max_share <= 1:
            raise ConfigError(f"{where}.max_share={pool.max_share}: must lie in (0, 1]")
        if fleet.provider == "static" and len(pool.urls) != pool.engines:
            counts = f"{len(pool.urls)} for {pool.engines}"
            raise ConfigError(f"{where}: provider static needs one URL per engine, got {counts}")
    require_compatible(fleet)


def _check_algo(algo: Algo, fleet: Fleet) -> None:
    _one_of("algo.weights", algo.weights, WEIGHT_RULES)
    by_view = {f"algo.bounds_by_view.{view}": bounds for view, bounds in algo.bounds_by_view.items()}
    for where, bounds in {"algo.bounds": algo.bounds, **by_view}.items():
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] < math.inf:
            raise ConfigError(f"{where}={bounds}: need [low, high] with 0 <= low < high")
    for view in algo.bounds_by_view:
        if view not in fleet.views:
            raise ConfigError(f"algo.bounds_by_view.{view}: no pool of fleet {fleet.name} serves that view")
    if not (math.isfinite(algo.temperature) and algo.temperature > 0):
        raise ConfigError(f"algo.temperature={algo.temperature}: must be finite and above 0")
    if not 0 < algo.top_p <= 1:
        raise ConfigError(f"algo.top_p={algo.top_p}: must lie in (0, 1]")
    if algo.top_p < 1 and not 1 < algo.top_k <= 4096:
        raise ConfigError(
            f"algo.top_p={algo.top_p} needs a finite algo.top_k in 2..4096 (got {algo.top_k}): "
            "a flat distribution would record the whole vocabulary for one token"
        )
    if algo.score_centering and not algo.support and algo.head < 2:
        raise ConfigError(
            f"algo.head={algo.head}: score centering without top-p needs a recorded head, e.g. algo.head=128"
        )
