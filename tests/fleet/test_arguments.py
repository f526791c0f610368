import os
import sys
from pathlib import Path
from typing import Any

import pytest

from miles_mixprec.config import Fleet, Pool, load_fleet
from miles_mixprec.errors import ConfigError
from miles_mixprec.fleet.arguments import engine_environment, known_arguments, sglang_arguments


def fleet(**pool: Any) -> Fleet:
    return Fleet(name="f", model="m", context_length=1024, pools={"p": Pool(view="bf16", slots_per_engine=8, **pool)})


def parsed(arguments: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word, following in zip(arguments, [*arguments[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word[2:].replace("-", "_")] = True if following.startswith("--") else following
    return found


def test_cpu_engine() -> None:
    tree = fleet(kv_cache_dtype="fp8_e4m3")
    flags = parsed(sglang_arguments(tree, tree.pools["p"], model_path="/m", port=30001))
    assert flags["device"] == "cpu"
    assert flags["attention_backend"] == "torch_native"
    assert flags["sampling_backend"] == "pytorch"
    assert flags["max_running_requests"] == "8"
    assert flags["max_total_tokens"] == str(8 * 1024)
    assert flags["kv_cache_dtype"] == "fp8_e4m3"
    assert flags["weight_version"] == "0"
    for switch in (
        "disable_overlap_schedule",
        "disable_cuda_graph",
        "skip_server_warmup",
        "sleep_on_idle",
        "enable_metrics",
    ):
        assert flags[switch] is True
    assert (flags["host"], flags["port"], flags["model_path"]) == ("127.0.0.1", "30001", "/m")
    environment = engine_environment(tree.pools["p"])
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


def test_gpu_engine() -> None:
    tree = load_fleet(["fleet=article_mixed"])
    flags = parsed(sglang_arguments(tree, tree.pools["b300_nvfp4"], model_path="/m", port=1))
    assert flags["quantization"] == "modelopt_fp4"
    assert flags["max_running_requests"] == "64"
    assert "device" not in flags
    flags = parsed(sglang_arguments(tree, tree.pools["h100_bf16"], model_path="/m", port=1))
    assert flags["tp_size"] == "2"
    assert "quantization" not in flags
    assert engine_environment(tree.pools["h100_bf16"]) == {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    assert engine_environment(tree.pools["b200_nvfp4"])["SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16"] == "1"


def test_own_arguments_win_and_take_every_form() -> None:
    tree = fleet(
        sglang={
            "dtype": "float32",
            "cuda_graph_bs": [1, 2],
            "sleep_on_idle": False,
            "disable_cuda_graph": None,
            "json_model_override_args": {"a": 1},
        }
    )
    arguments = sglang_arguments(tree, tree.pools["p"], model_path="/m", port=1)
    assert arguments[arguments.index("--dtype") + 1] == "float32"
    start = arguments.index("--cuda-graph-bs")
    assert arguments[start : start + 3] == ["--cuda-graph-bs", "1", "2"]
    assert "--sleep-on-idle" not in arguments and "--disable-cuda-graph" not in arguments
    assert '{"a": 1}' in arguments


def test_reserved_and_unknown_keys_are_refused() -> None:
    tree = fleet(sglang={"port": 1})
    with pytest.raises(
        ConfigError, match=r"fleet\.pools\.p\.sglang\.port: set by the fleet, not here; remove the key"
    ):
        sglang_arguments(tree, tree.pools["p"], model_path="/m", port=1)
    tree = fleet(sglang={"atention_backend": "fa3"})
    with pytest.raises(ConfigError, match=r"fleet\.pools\.p\.sglang\.atention_backend: this SGLang has no such"):
        sglang_arguments(tree, tree.pools["p"], model_path="/m", port=1, known={"attention_backend"})
    assert "--atention-backend" in sglang_arguments(tree, tree.pools["p"], model_path="/m", port=1)


def test_known_arguments_of_the_interpreter_that_runs_the_engines(tmp_path: Path) -> None:
    server_args = tmp_path / "sglang" / "srt" / "server_args.py"
    server_args.parent.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "srt" / "__init__.py").touch()
    server_args.write_text(
        "print('noise')\n"
        "class ServerArgs:\n"
        "    @staticmethod\n"
        "    def add_cli_args(parser):\n"
        "        parser.add_argument('--only-here')\n"
    )
    known = known_arguments(sys.executable, os.environ | {"PYTHONPATH": str(tmp_path)})
    assert known is not None and "only_here" in known
    server_args.write_text("raise ImportError('broken')\n")
    assert known_arguments(sys.executable, os.environ | {"PYTHONPATH": str(tmp_path), "OTHER": "1"}) is None
