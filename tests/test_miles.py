"""The seams in Miles itself: in 0.0.2 from the environment, and in 0.1 where MILES_SOURCE points at a checkout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHIMS = ROOT / "examples" / "cpu_quickstart" / "shims"


def miles_paths(generation):
    if generation == "0.0.2":
        return []
    source = os.environ.get("MILES_SOURCE")
    sglang = Path(sys.prefix) / "sglang-0.5.16"
    if not source or not sglang.exists():
        pytest.skip("no Miles 0.1: set MILES_SOURCE to a checkout and run tests/run.sh")
    return [source, str(sglang)]


def run_with_miles(generation, program):
    """Run `program` in a process of its own that imports this Miles; return what it prints."""
    path = [str(SHIMS), *miles_paths(generation), str(ROOT)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "MIXPREC_CPU_TRAINER": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "PYTHONWARNINGS": "ignore",
        "SGLANG_USE_CPU_ENGINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


CHECKS = """
import json, sys
from argparse import Namespace
import numpy as np
from miles.utils.types import Sample
from miles.backends.training_utils.data import DataIterator
from miles_mixprec import miles
from miles_mixprec.rollout.carrier import unpack
from miles_mixprec.rollout.record import SamplerRecord

class Args(Namespace):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return None

def record(rows, pool):
    return SamplerRecord(pool=pool, view="fp8", engines=[pool + "/0"], turn_offsets=np.array([0, rows], np.int32),
        weight_versions=np.zeros(rows, np.int32), topk_token_ids=None, topk_log_probs=None, support=None,
        temperature=1.0, top_p=1.0, top_k=-1)

def make_samples():
    samples = []
    for i in range(4):
        s = Sample(index=i, group_index=i // 2, tokens=[1, 2, 3, 4][: 2 + i % 3], response_length=1 + i % 2,
            reward=float(i % 2), rollout_log_probs=[-1.0] * (1 + i % 2), status=Sample.Status.COMPLETED,
            weight_versions=["3"])
        s.mixprec_record = record(s.response_length, "p%d" % i)
        samples.append(s)
    return samples

def message(call, *args):
    try:
        call(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

found = {"generation": miles.features().generation}
for dynamic in (False, True):
    args = Args(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False,
        n_samples_per_prompt=2, rollout_batch_size=2, use_dynamic_global_batch_size=dynamic, global_batch_size=4)
    data = miles.convert_samples(args, make_samples())
    pools = [unpack(blob).pool for blob in data["prompt"]]
    found[f"converted {dynamic}"] = {**data, "prompt": pools}

orphan = make_samples()
del orphan[2].mixprec_record
found["without record"] = message(miles.convert_samples, args, orphan)

stock = DataIterator.get_next
DataIterator.get_next = lambda self, keys, extra: None
found["drift"] = message(miles._deliver_records)
DataIterator.get_next = stock
miles._deliver_records()
miles._deliver_records()
names = ("tokens", "prompt", "response_lengths")
iterator = DataIterator({n: data[n] for n in names}, None, [[3, 0], [2, 1]])
found["batches"] = []
for _ in range(2):
    batch = iterator.get_next(["tokens", "response_lengths"])
    sources = batch["mixprec_source"]
    found["batches"].append({
        "keys": sorted(batch), "pools": [s.pool for s in sources], "rows": [len(s.weight_versions) for s in sources],
        "response_lengths": batch["response_lengths"]})

miles._publish_weights()
miles._log_training()
from miles.backends.megatron_utils import actor
found["updater"] = actor.UpdateWeightFromDistributed.__module__
found["tracking"] = miles._tracking_registry()["mixprec"][1]
print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module", params=["0.0.2", "0.1"])
def found(request):
    """What the seams of one Miles do, from one process that imports it."""
    return request.param, json.loads(run_with_miles(request.param, CHECKS).splitlines()[-1])


def test_features_tell_the_generations_apart(found):
    generation, results = found
    assert results["generation"] == generation


@pytest.mark.parametrize("dynamic", [False, True])
def test_conversion_is_the_stock_one_with_the_records_aboard(found, dynamic):
    data = found[1][f"converted {dynamic}"]
    assert data["tokens"] == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2]]
    assert data["rewards"] == [-0.5, 0.5, -0.5, 0.5]  # the stock group mean, without the deviation
    assert data["loss_masks"] == [[1], [1, 1], [1], [1, 1]]
    assert data["rollout_log_probs"] == [[-1.0], [-1.0, -1.0], [-1.0], [-1.0, -1.0]]
    assert data["weight_versions"] == [["3"]] * 4
    assert data.get("dynamic_global_batch_size") == (4 if dynamic else None)
    assert data["prompt"] == ["p0", "p1", "p2", "p3"]


def test_samples_of_another_generate_function_are_refused(found):
    assert found[1]["without record"].startswith(
        "ContractError: sample 2 has no sampler record; set --custom-generate-function-path"
    )


def test_micro_batches_carry_their_own_samples_records(found):
    """Through the stock iterator in any order of samples, with the patch installed twice."""
    for batch, order in zip(found[1]["batches"], ([3, 0], [2, 1]), strict=True):
        assert batch["pools"] == [f"p{i}" for i in order]
        assert batch["rows"] == batch["response_lengths"]
        assert "prompt" not in batch["keys"] and "rollout_sampling_mask" in batch["keys"]


def test_drift_of_a_patched_signature_is_loud(found):
    assert found[1]["drift"].startswith("CapabilityError") and "['self', 'keys']" in found[1]["drift"]


def test_the_updater_is_the_publisher_and_training_is_logged(found):
    assert found[1]["updater"] == "miles_mixprec.weights.publisher"
    assert found[1]["tracking"] == "mixprec"
