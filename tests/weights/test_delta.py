"""Deltas: catching up over several versions is a clean encode of the last, and only what changed travels."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import weight_models as models
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import delta, encode, files, store
from miles_mixprec.weights.store import Store

VIEWS = ["fp8", "nvfp4"]


def train(opened: Store, scratch: Path, versions: int, *, anchor_every: int) -> list[dict[str, torch.Tensor]]:
    history, tensors = [], models.moe()
    for version in range(versions):
        history.append(tensors)
        opened.publish("bf16", version, tensors.items(), models.CONFIG)
        pointer = opened.latest("bf16")
        assert pointer is not None
        encode.encode_version(opened, pointer, VIEWS, scratch, anchor_every=anchor_every)
        tensors = models.trained(tensors, version)
    return history


def checksums(replica: delta.Replica) -> dict[str, str]:
    return {name: files.tensor_checksum(tensor) for name, tensor in replica.read()}


@pytest.mark.parametrize("view", VIEWS)
def test_catching_up_over_deltas_gives_a_clean_encode_of_the_last_version(view: str, tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "deltas"), "run")
    history = train(opened, tmp_path / "scratch", 6, anchor_every=4)
    assert [opened.manifest(view, v).base for v in range(6)] == [None, 0, 1, 2, None, 4]
    clean = store.init(str(tmp_path / "clean"), "run")
    clean.publish("bf16", 3, history[3].items(), models.CONFIG)
    encode.encode_version(clean, clean.latest("bf16"), [view], tmp_path / "scratch2")
    expected = checksums(delta.stage(clean, view, clean.latest(view), tmp_path / "staged"))
    manifest = opened.manifest(view, 3)
    late = store.Pointer(3, "run", 1, manifest.digest)
    replica = delta.stage(opened, view, late, tmp_path / "late")  # from the anchor, over three deltas
    assert checksums(replica) == expected
    assert (replica.directory / "config.json").read_bytes() == Path(
        clean.directory(view, 3), "config.json"
    ).read_bytes()


def test_a_follower_applies_each_delta_to_what_it_holds(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    tensors = models.moe()
    for version in range(5):
        opened.publish("bf16", version, tensors.items(), models.CONFIG)
        encode.encode_version(opened, opened.latest("bf16"), ["fp8"], tmp_path / "scratch", anchor_every=100)
        replica = delta.stage(opened, "fp8", opened.latest("fp8"), tmp_path / "follower")
        assert replica.manifest.version == version and len(checksums(replica)) == len(replica.manifest.tensors)
        tensors = models.trained(tensors, version)
    assert len(list((tmp_path / "follower").glob("replica-*"))) == 2  # the one it serves and the one before


def test_only_changed_bytes_travel_and_are_counted(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    train(opened, tmp_path / "scratch", 2, anchor_every=100)
    for view in VIEWS:
        full, small = opened.manifest(view, 0), opened.manifest(view, 1)
        assert full.stats == {} and small.stats["total_bytes"] == sum(e.bytes for e in full.tensors.values())
        assert 0 < small.stats["changed_bytes"] < 0.1 * small.stats["total_bytes"]
        assert (
            small.stats["wire_bytes"]
            == sum(e.bytes for e in small.tensors.values())
            < 0.3 * small.stats["total_bytes"]
        )


def test_an_update_that_changes_nothing_sends_nothing(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    for version in (0, 1):
        opened.publish("bf16", version, models.moe().items(), models.CONFIG)
        encode.encode_version(opened, opened.latest("bf16"), ["fp8"], tmp_path / "scratch", anchor_every=100)
    assert opened.manifest("fp8", 1).stats["wire_bytes"] == 0
    staged = delta.stage(opened, "fp8", opened.latest("fp8"), tmp_path / "follower")
    assert staged.manifest.version == 1
    file = next(iter(staged.manifest.files))
    assert (staged.directory / file).stat().st_ino == Path(opened.directory("fp8", 0), file).stat().st_ino


def test_pruning_keeps_the_base_of_every_delta(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    train(opened, tmp_path / "scratch", 6, anchor_every=4)
    assert opened.prune("fp8", 1) == [0, 1, 2, 3]
    assert opened.versions("fp8") == [4, 5]
    delta.stage(opened, "fp8", opened.latest("fp8"), tmp_path / "late")


@pytest.mark.parametrize("how", ["flip", "truncate"])
def test_a_damaged_delta_is_refused_by_name_and_the_base_survives(how: str, tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    train(opened, tmp_path / "scratch", 2, anchor_every=100)
    before = delta.stage(
        opened, "fp8", store.Pointer(0, "run", 1, opened.manifest("fp8", 0).digest), tmp_path / "follower"
    )
    expected = checksums(before)
    file = Path(opened.directory("fp8", 1)) / next(name for name in opened.manifest("fp8", 1).files)
    data = bytearray(file.read_bytes())
    if how == "flip":
        data[-9] ^= 1
    file.write_bytes(data if how == "flip" else data[: len(data) // 2])
    with pytest.raises(StoreError):
        delta.stage(opened, "fp8", opened.latest("fp8"), tmp_path / "follower")
    assert checksums(before) == expected


@pytest.mark.parametrize("bad", ["replica-000001*/model-*", "delta-000002*/model-*"])
def test_a_bad_local_copy_does_not_outlive_one_attempt(bad: str, tmp_path: Path) -> None:
    opened = store.init(f"memory://heal-{tmp_path.name}-{os.getpid()}", "run")
    tensors, follower = models.moe(experts=1), tmp_path / "follower"
    for version in range(3):
        opened.publish("bf16", version, tensors.items(), models.CONFIG)
        encode.encode_version(opened, opened.latest("bf16"), ["fp8"], tmp_path / "scratch", anchor_every=100)
        if version == 1:
            delta.stage(opened, "fp8", opened.latest("fp8"), follower)
        tensors = models.trained(tensors, version)
    pointer = opened.latest("fp8")
    if bad.startswith("delta"):
        delta.stage(opened, "fp8", pointer, follower)
        [whole] = follower.glob("replica-000002*")
        shutil.rmtree(whole)
    [file] = follower.glob(bad)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(StoreError, match="fp8 version 2"):
        delta.stage(opened, "fp8", pointer, follower)
    assert delta.stage(opened, "fp8", pointer, follower).manifest.version == 2


def test_a_writer_without_tensors_joins_a_delta(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    opened.publish("bf16", 0, models.moe().items(), models.CONFIG)
    base = delta.stage(opened, "bf16", opened.latest("bf16"), tmp_path / "scratch")
    for part, tensors in enumerate([models.trained(models.moe(), 1), {}]):
        writer = opened.writer("bf16", 1, part=part, base=base)
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.close()
    assert opened.seal("bf16", 1, parts=2, config=models.CONFIG).stats["changed_bytes"] > 0


@settings(max_examples=25, deadline=None)
@given(st.binary(min_size=1, max_size=400), st.data())
def test_any_bytes_survive_a_delta(tmp_path_factory: pytest.TempPathFactory, old: bytes, data: st.DataObject) -> None:
    new = data.draw(st.binary(min_size=len(old), max_size=len(old)))
    root = tmp_path_factory.mktemp("delta")
    opened = store.init(str(root / "store"), "run")
    as_tensor = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in (old, new)]
    opened.publish("bf16", 0, [("t", as_tensor[0])], {})
    base = delta.stage(opened, "bf16", opened.latest("bf16"), root / "a")
    writer = opened.writer("bf16", 1, base=base)
    writer.add("t", as_tensor[1])
    writer.close()
    opened.seal("bf16", 1, parts=1, config={})
    result = delta.stage(opened, "bf16", opened.latest("bf16"), root / "b")
    assert dict(result.read())["t"].numpy().tobytes() == new
