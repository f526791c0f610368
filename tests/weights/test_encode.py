"""The encoder process: every view follows latest/bf16, alone or sharded, and says which BF16 it was made from."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import weight_models as models
from weight_runs import run_config, until, wait_for

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import encode, store


def start(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "miles_mixprec.weights.encode", "--config", str(root / "run.yaml"), *arguments]
    )


def test_sharded_encoders_publish_what_one_would(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    opened = store.init(config.weights.store, "run")
    opened.publish("bf16", 0, models.moe().items(), models.CONFIG)
    alone = store.init(str(tmp_path / "alone"), "run")
    alone.publish("bf16", 0, models.moe().items(), models.CONFIG)
    encode.encode_version(alone, alone.latest("bf16"), ["fp8", "nvfp4"], tmp_path / "scratch")
    pointer = opened.latest("bf16")
    for shard in (2, 0, 1):
        assert encode.seal_version(opened, pointer, "nvfp4", tmp_path / "scratch", shards=3) is None
        encode.encode_part(opened, pointer, ["fp8", "nvfp4"], tmp_path / "scratch", shard=shard, shards=3)
    for view in ("fp8", "nvfp4"):
        sealed = encode.seal_version(opened, pointer, view, tmp_path / "scratch", shards=3)
        expected = alone.manifest(view, 0)
        assert (
            sealed.source == pointer.manifest and sealed.documents["config.json"] == expected.documents["config.json"]
        )
        assert {n: e.xxh3 for n, e in sealed.tensors.items()} == {n: e.xxh3 for n, e in expected.tensors.items()}


def test_processes_follow_publications_resumes_and_their_own_death(tmp_path: Path) -> None:
    config = run_config(tmp_path, keep_versions=2)
    opened = store.init(config.weights.store, "run")
    views = ("fp8", "nvfp4")
    processes = [start(tmp_path, "--shard", f"{i}/2") for i in range(2)]
    try:
        for version in range(3):
            opened.publish("bf16", version, models.moe(version).items(), models.CONFIG)
            wait_for(opened, version, views)
        processes[1].kill()
        processes[1].wait()
        opened.publish("bf16", 3, models.moe(3).items(), models.CONFIG)
        time.sleep(0.3)
        assert opened.latest("fp8").version == 2  # half of it is missing, so it is not there
        processes[1] = start(tmp_path, "--shard", "1/2")
        wait_for(opened, 3, views)
        until(lambda: opened.versions("fp8") == [2, 3])
        resumed = opened.rewind(2)
        resumed.publish("bf16", 3, models.moe(33).items(), models.CONFIG)
        wait_for(resumed, 3, views, attempt=2)
        for view in views:
            assert resumed.manifest(view, 3).source == resumed.latest("bf16").manifest
        assert all(process.poll() is None for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_resume_while_a_version_is_encoded_does_not_end_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Waits(Exception):
        pass

    def wait(_: float) -> None:
        raise Waits

    config = run_config(tmp_path)
    opened = store.init(config.weights.store, "run")
    opened.publish("bf16", 0, models.moe().items(), models.CONFIG)
    real = encode.encode_part

    def resumed_meanwhile(*arguments: object, **options: object) -> None:
        # a resume has taken the store over and checks the kept versions before it moves the pointers
        (tmp_path / "store" / "run.json").write_text('{"run": "run", "attempt": 2}')
        real(*arguments, **options)

    monkeypatch.setattr(encode, "encode_part", resumed_meanwhile)
    monkeypatch.setattr(encode.time, "sleep", wait)
    with pytest.raises(Waits):
        encode.follow(config, ["fp8"])
    assert store.open_store(opened.root, "run").latest("fp8") is None


def test_a_version_that_is_not_finite_ends_the_encoder_with_its_name(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    opened = store.init(config.weights.store, "run")
    tensors = models.moe()
    tensors["model.norm.weight"][0] = float("nan")
    opened.publish("bf16", 0, tensors.items(), models.CONFIG)
    with pytest.raises(StoreError, match=r"model\.norm\.weight holds NaN"):
        encode.follow(config, ["fp8"])
    assert opened.latest("fp8") is None
