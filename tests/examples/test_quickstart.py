"""The main job in a short form: real Miles, real Megatron, real SGLang engines of three precisions."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "examples" / "cpu_quickstart" / "run.sh"
SMALL = ["prompts_per_update=12", "samples_per_prompt=4"]

pytestmark = pytest.mark.engines


def start(run_dir, *overrides, **environment):
    """The quickstart; Ctrl-C reaches it even where these tests run in the background of a shell, which ignores it."""
    return subprocess.Popen(
        ["bash", str(RUN), f"run_dir={run_dir}", *SMALL, *overrides],
        env={key: value for key, value in os.environ.items() if key != "MILES_SOURCE"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finish(process, timeout=600):
    out, _ = process.communicate(timeout=timeout)
    return process.returncode, out


def lines(run_dir, kind):
    path = Path(run_dir) / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["kind"] == kind]


def processes_of(run_dir):
    """Processes whose command line or environment names the run folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if str(run_dir).encode() in (entry / "cmdline").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
            except OSError:
                continue
    return found


def await_no_processes(run_dir, seconds=30):
    deadline = time.monotonic() + seconds
    while (left := processes_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("quickstart") / "run"
    status, out = finish(start(run_dir, "updates=2", "miles_args.save-interval=1"))
    assert status == 0, out[-4000:]
    return run_dir, out


def test_every_sample_has_a_source_and_versions_advance(finished):
    run_dir, _ = finished
    rollouts = lines(run_dir, "rollout")
    assert [row["update"] for row in rollouts] == [0, 1]
    assert all(sum(pool["samples"] for pool in row["per_pool"].values()) == row["samples"] == 48 for row in rollouts)
    assert {pool for row in rollouts for pool in row["per_pool"]} == {"bf16", "fp8", "nvfp4"}
    assert 0 < rollouts[0]["reward"] < 1
    for view in ("bf16", "fp8", "nvfp4"):
        assert json.loads((run_dir / "store" / "latest" / view).read_text())["version"] == 2
    sidecars = (run_dir / "logs" / "sidecars.log").read_text()
    assert all(
        f"{view}/0 serves version 2" in sidecars or f"{view}/0 serves version 1" in sidecars
        for view in ("bf16", "fp8", "nvfp4")
    )


def test_sampler_and_trainer_agree_on_every_token(finished):
    """On version 0 nothing is stale: both normalise on the same support, and the BF16 pool is the trainer's model."""
    metrics = lines(finished[0], "train")[0]["metrics"]

    def mean(group, name):
        return metrics[f"mixprec/{group}/{name}_num"] / metrics[f"mixprec/{group}/{name}_den"]

    assert mean("all", "sampler_mass") == pytest.approx(1, abs=1e-3)
    assert mean("all", "trainer_mass") == pytest.approx(1, abs=1e-3)
    assert mean("pool/bf16", "kl") < 1e-9
    assert 1e-7 < mean("pool/fp8", "kl") < 1e-2
    assert 1e-7 < mean("pool/nvfp4", "kl") < 1e-2
    assert np.isfinite([row["grad_norm"] for row in lines(finished[0], "train")]).all()


def test_the_run_folder_is_complete(finished):
    run_dir, out = finished
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["algo"]["name"] == "sc_mis_top_p"
    command = (run_dir / "miles_command.txt").read_text().splitlines()
    assert "--custom-loss-function-path" in command
    assert {path.name for path in (run_dir / "logs").iterdir()} >= {
        "miles.log", "router.log", "sidecars.log", "encoder-0.log",
        "engine-bf16-0.log", "engine-fp8-0.log", "engine-nvfp4-0.log",
    }  # fmt: skip
    report = (run_dir / "report.html").read_text()
    assert "dequantized" in report and "http://" not in report.replace("http://www.w3.org", "")
    assert "update 1" in out  # the live view
    await_no_processes(run_dir)


def test_a_finished_run_is_not_run_again(finished):
    run_dir, _ = finished
    before = lines(run_dir, "train")
    status, out = finish(start(run_dir, "updates=2", "miles_args.save-interval=1"))
    assert status == 0 and "finished" in out
    assert lines(run_dir, "train") == before


def test_another_arm_does_not_enter_the_run_folder(finished):
    status, out = finish(start(finished[0], "updates=3", "algo=grpo", "miles_args.save-interval=1"))
    assert status == 2 and "another algo" in out


def test_a_run_goes_on_from_its_checkpoint_and_an_engine_s_death_ends_it(finished):
    run_dir, _ = finished
    process = start(run_dir, "updates=40", "miles_args.save-interval=1")
    deadline = time.monotonic() + 300
    while len(lines(run_dir, "train")) < 4 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    assert process.poll() is None, finish(process)[1]
    assert [row["update"] for row in lines(run_dir, "train")][:4] == [0, 1, 2, 3]
    engine = next(pid for pid, command in engine_processes() if f"{run_dir}/start/nvfp4" in command)
    os.kill(engine, signal.SIGKILL)
    status, out = finish(process, timeout=120)
    assert status == 2
    assert "error: pool nvfp4: engine nvfp4/0 exited" in out.replace("\n", " ")
    await_no_processes(run_dir)


def test_ctrl_c_leaves_no_process(tmp_path):
    run_dir = tmp_path / "run"
    process = start(run_dir, "updates=40")
    deadline = time.monotonic() + 240
    while not (run_dir / "logs" / "miles.log").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.5)
    assert process.poll() is None, finish(process)[1]
    os.kill(process.pid, signal.SIGINT)
    status, out = finish(process, timeout=120)
    assert status == 130 and "interrupted" in out
    await_no_processes(run_dir)


def engine_processes():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if "-m sglang.launch_server" in command and "miles_mixprec/providers/process.py" not in command:
                yield int(entry.name), command


def test_the_same_job_runs_on_miles_0_1(tmp_path):
    """Miles' own train_async.py, unmodified, with --fully-async."""
    if not os.environ.get("MILES_SOURCE"):
        pytest.skip("no Miles 0.1: set MILES_SOURCE to a checkout")
    source = {"MILES_SOURCE": os.environ["MILES_SOURCE"]}
    status, out = finish(start(tmp_path / "run", "updates=2", **source))
    assert status == 0, out[-4000:]
    assert "Miles 0.1 starts" in out
    first = lines(tmp_path / "run", "train")[0]["metrics"]
    assert first["mixprec/pool/bf16/kl_num"] / first["mixprec/pool/bf16/kl_den"] < 1e-9
    assert json.loads((tmp_path / "run" / "store" / "latest" / "nvfp4").read_text())["version"] == 2
    await_no_processes(tmp_path / "run")
