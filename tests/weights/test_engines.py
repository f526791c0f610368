"""Real SGLang engines under load follow published versions, and every token is what its version's weights give."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_models as models
from safetensors.torch import save_file
from weight_fakes import FakeRouter
from weight_runs import run_config, until

from miles_mixprec.providers.process import free_port
from miles_mixprec.weights import store
from miles_mixprec.weights.checkpoint import decode_checkpoint, encode_checkpoint

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
SHIMS = ROOT / "examples" / "cpu_quickstart" / "shims"
SGLANG = Path(os.environ.get("SGLANG_0523", ROOT / ".venv" / "sglang-0.5.23"))
VERSIONS = 50
PROBE = [5, 77, 130, 9, 201, 44, 18, 250]
HIDDEN, VOCABULARY, EXPERTS = 128, 256, 8
HF_CONFIG = models.CONFIG | {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def qwen3_moe(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def new(*shape: int, scale: float = 0.08) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": new(VOCABULARY, HIDDEN, scale=0.5),
        "model.norm.weight": ones.clone(),
        "lm_head.weight": new(VOCABULARY, HIDDEN, scale=0.3),
    }
    for i in range(2):
        layer = f"model.layers.{i}"
        heads = {"q_proj": (128, HIDDEN), "k_proj": (64, HIDDEN), "v_proj": (64, HIDDEN), "o_proj": (HIDDEN, 128)}
        tensors |= {f"{layer}.self_attn.{name}.weight": new(*shape) for name, shape in heads.items()}
        tensors |= {f"{layer}.self_attn.{name}_norm.weight": ones[:32].clone() for name in "qk"}
        tensors |= {f"{layer}.{name}_layernorm.weight": ones.clone() for name in ("input", "post_attention")}
        tensors[f"{layer}.mlp.gate.weight"] = new(EXPERTS, HIDDEN)
        for e in range(EXPERTS):
            for part, shape in (("gate", (64, HIDDEN)), ("up", (64, HIDDEN)), ("down", (HIDDEN, 64))):
                tensors[f"{layer}.mlp.experts.{e}.{part}_proj.weight"] = new(*shape)
    return tensors


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.loads(reply.read())


def start_engine(model: Path, port: int) -> subprocess.Popen[bytes]:
    env = os.environ | {
        "PYTHONPATH": f"{SHIMS}:{SGLANG}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    flags = (
        f"--model-path {model} --port {port} --host 127.0.0.1 --weight-version 0 --device cpu --dtype float32 "
        "--skip-tokenizer-init --attention-backend torch_native --sampling-backend pytorch --disable-overlap-schedule "
        "--disable-cuda-graph --skip-server-warmup --sleep-on-idle --mem-fraction-static 0.1 --max-total-tokens 8192 "
        "--max-running-requests 8 --log-level error"
    )
    return subprocess.Popen(
        [sys.executable, "-m", "sglang.launch_server", *flags.split()], env=env, start_new_session=True
    )


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/model_info", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False


def generate(url: str, prompt: list[int], tokens: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    meta = post(f"{url}/generate", body)["meta_info"]
    logged = meta["output_token_logprobs"]
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": len(logged)}]
    versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
    return {
        "prompt": prompt,
        "tokens": [entry[1] for entry in logged],
        "log_probs": [entry[0] for entry in logged],
        "versions": versions,
    }


class Load:
    """Requests without pause, so that every update finds the engine at work."""

    def __init__(self, url: str) -> None:
        self.url, self.samples, self.stopped = url, [], threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        rng = random.Random(self.url)
        while not self.stopped.is_set():
            try:
                self.samples.append(generate(self.url, rng.choices(range(1, VOCABULARY), k=6), 16))
            except OSError:
                time.sleep(0.2)


REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = lru = None
for line in sys.stdin:
    directory, samples = json.loads(line)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    out = []
    for ids, start in samples:
        with torch.no_grad():
            log_probs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        out.append([log_probs[i - 1, ids[i]].item() for i in range(start, len(ids))])
    print(json.dumps(out), flush=True)
"""


def reference(jobs: list[tuple[str, list[tuple[list[int], int]]]]) -> list[list[list[float]]]:
    """Log-probs of token sequences from position `start` on, by transformers, per model directory."""
    env = os.environ | {"PYTHONPATH": str(SHIMS), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    lines = "\n".join(json.dumps(job) for job in jobs)
    run = subprocess.run([sys.executable, "-c", REFERENCE], input=lines, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]


@pytest.fixture
def router() -> Iterator[tuple[str, FakeRouter]]:
    fake, loop, url = FakeRouter(), asyncio.new_event_loop(), []
    ready = threading.Event()

    async def serve() -> None:
        url.append(await fake.start())
        ready.set()
        await asyncio.Event().wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    ready.wait()
    yield url[0], fake


def test_engines_follow_fifty_versions_under_load(tmp_path: Path, router: tuple[str, FakeRouter]) -> None:
    if not (SGLANG / "sglang").exists():
        pytest.skip("SGLang 0.5.23 is not there; set SGLANG_0523 to a directory that holds it")
    router_url, fake = router
    config = run_config(tmp_path, keep_versions=VERSIONS + 1)
    model = tmp_path / "model"
    model.mkdir()
    save_file(qwen3_moe(0), model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps(HF_CONFIG))
    opened = store.init(config.weights.store, "run")
    urls = {f"{view}/0": f"http://127.0.0.1:{free_port()}" for view in ("bf16", "nvfp4")}

    def follow(*command: str) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", *command, "--config", str(tmp_path / "run.yaml"))
        return subprocess.Popen(command, start_new_session=True)

    def sidecar() -> subprocess.Popen[bytes]:
        engines = [part for name, url in urls.items() for part in ("--engine", f"{name}={url}")]
        where = ("--router", router_url, "--staging", str(tmp_path / "staging"))
        return follow("miles_mixprec.weights.sidecar", *where, *engines)

    def serving(name: str) -> int | None:
        last = next((w for w in reversed(fake.workers) if w["engine"] == name), {"state": "", "weight_version": None})
        return last["weight_version"] if last["state"] == "serving" else None

    models_at_start = {"bf16/0": model, "nvfp4/0": tmp_path / "nvfp4-decoded"}
    encode_checkpoint(model, "nvfp4", tmp_path / "nvfp4")
    decode_checkpoint(tmp_path / "nvfp4", models_at_start["nvfp4/0"])
    engines = {name: start_engine(models_at_start[name], int(url.rsplit(":", 1)[1])) for name, url in urls.items()}
    processes = [follow("miles_mixprec.weights.encode", "--views", "nvfp4"), sidecar()]
    loads = [Load(url) for url in urls.values()]
    probes: list[tuple[str, int, dict[str, Any]]] = []
    try:
        until(lambda: all(healthy(url) for url in urls.values()), seconds=240)
        for load in loads:
            load.thread.start()
        for version in range(VERSIONS):
            if version == VERSIONS // 2:
                end(processes[1])  # the sidecar dies, wherever it is, and another takes over
                processes[1] = sidecar()
            opened.publish("bf16", version, qwen3_moe(version).items(), HF_CONFIG)
            until(lambda: all(serving(name) == version for name in urls), lambda: fake.states[-6:])  # noqa: B023
            probes += [(name.split("/")[0], version, generate(url, PROBE, 4)) for name, url in urls.items()]
        end(engines["bf16/0"])  # an engine dies and comes back with the model of version 0
        engines["bf16/0"] = start_engine(model, int(urls["bf16/0"].rsplit(":", 1)[1]))
        until(lambda: serving("bf16/0") is None, seconds=60)
        until(lambda: serving("bf16/0") == VERSIONS - 1, seconds=240)
        probes.append(("bf16", VERSIONS - 1, generate(urls["bf16/0"], PROBE, 4)))
    finally:
        for load in loads:
            load.stopped.set()
        for process in [*processes, *engines.values()]:
            end(process)

    samples = [(view, s) for view, load in zip(("bf16", "nvfp4"), loads, strict=True) for s in load.samples]
    assert len({v for _, s in samples for v in s["versions"]}) > VERSIONS / 2
    assert all(set(probe["versions"]) == {version} for _, version, probe in probes)
    checked = probes + [
        (view, version, s) for view, s in samples[:: max(len(samples) // 300, 1)] for version in set(s["versions"])
    ]
    by_model: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for view, version, sample in checked:
        by_model.setdefault((view, version), []).append(sample)
    jobs = []
    for (view, version), group in by_model.items():
        directory = tmp_path / "clean" / f"{view}-{version}"
        decode_checkpoint(Path(opened.directory(view, version)), directory)
        jobs.append((str(directory), [(s["prompt"] + s["tokens"], len(s["prompt"])) for s in group]))
    worst, tokens = 0.0, 0
    for ((view, version), group), expected in zip(by_model.items(), reference(jobs), strict=True):
        for sample, log_probs in zip(group, expected, strict=True):
            for served, got, want in zip(sample["versions"], sample["log_probs"], log_probs, strict=True):
                if served == version:
                    worst, tokens = max(worst, abs(got - want)), tokens + 1
                    assert abs(got - want) < 1e-3, f"a token sampled as {view} version {version} is of another model"
    print(f"{tokens} tokens of {len(samples)} samples and {len(probes)} probes, largest difference {worst:.1e}")
