"""Versions, pointers and fences: what is torn, foreign, damaged or behind never becomes visible."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
import torch
import weight_models as models
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import delta, files, store
from miles_mixprec.weights.store import Pointer, Store

CONFIG = models.CONFIG


def tensors(value: int) -> dict[str, torch.Tensor]:
    return {"a.weight": torch.full((4, 8), float(value)).bfloat16(), "b.weight": torch.arange(6.0) + value}


def publish(opened: Store, version: int, view: str = "bf16") -> None:
    opened.publish(view, version, tensors(version).items(), CONFIG)


def value(opened: Store, version: int, view: str = "bf16") -> float:
    return dict(opened.read(view, version))["a.weight"][0, 0].item()


@pytest.fixture(params=["local", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    root = str(tmp_path / "store") if request.param == "local" else f"memory://{tmp_path.name}-{os.getpid()}"
    return store.init(root, "run")


def test_a_published_version_reads_back(opened: Store, tmp_path: Path) -> None:
    assert opened.latest("bf16") is None and opened.manifest("bf16", 0) is None
    for version in (0, 1, 2):
        publish(opened, version)
        pointer = opened.latest("bf16")
        assert pointer is not None and (pointer.version, pointer.run, pointer.attempt) == (version, "run", 1)
        read = dict(opened.read("bf16", version))
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors(version).items())
    replica = delta.stage(opened, "bf16", pointer, tmp_path / "staged")
    assert json.loads((replica.directory / "config.json").read_text()) == CONFIG
    index = json.loads((replica.directory / store.INDEX).read_text())
    assert index["weight_map"].keys() == tensors(0).keys()
    assert all((replica.directory / file).exists() for file in index["weight_map"].values())


def test_a_pointer_never_goes_backwards(opened: Store) -> None:
    publish(opened, 3)
    with pytest.raises(StoreError, match="cannot go back to 2"):
        publish(opened, 2)
    assert opened.latest("bf16").version == 3


def test_another_run_cannot_use_the_store(opened: Store) -> None:
    publish(opened, 0)
    with pytest.raises(StoreError, match="belongs to run run, not other"):
        store.init(opened.root, "other")
    foreign = Store(opened.root, "other", 1)
    with pytest.raises(StoreError, match="must stop writing"):
        publish(foreign, 1)
    with pytest.raises(StoreError, match="belongs to run run"):
        foreign.latest("bf16")


def test_a_rewind_points_every_view_at_or_below_and_fences_the_old_attempt_out(opened: Store) -> None:
    for version in range(4):
        publish(opened, version)
        if version < 2:
            publish(opened, version, "fp8")
    publish(opened, 3, "nvfp4")
    resumed = opened.rewind(2)
    assert {
        view: (p.version, p.attempt) if (p := resumed.latest(view)) else None for view in ("bf16", "fp8", "nvfp4")
    } == {
        "bf16": (2, 2),
        "fp8": (1, 2),
        "nvfp4": None,
    }
    assert resumed.versions("bf16") == [0, 1, 2] and resumed.versions("nvfp4") == []
    with pytest.raises(StoreError, match="attempt 2"):
        publish(opened, 4)
    publish(resumed, 3)
    assert store.open_store(resumed.root, "run") == resumed
    assert value(resumed, 3) == 3


def test_parts_of_several_writers_join(opened: Store) -> None:
    named = list(tensors(5).items())
    for part, (name, tensor) in enumerate(named):
        assert opened.parts("bf16", 5, 2, "") is None
        writer = opened.writer("bf16", 5, part=part)
        writer.add(name, tensor)
        writer.close()
    opened.seal("bf16", 5, parts=2, config=CONFIG)
    assert value(opened, 5) == 5


def test_parts_of_another_source_or_attempt_do_not_count(opened: Store) -> None:
    writer = opened.writer("fp8", 1, source="of version 1")
    writer.add("a.weight", tensors(1)["a.weight"])
    writer.close()
    assert opened.parts("fp8", 1, 1, "of another version 1") is None
    assert opened.parts("fp8", 1, 1, "of version 1") is not None
    resumed = opened.rewind(0)
    assert resumed.parts("fp8", 1, 1, "of version 1") is None
    with pytest.raises(StoreError, match="lacks some of its 1 parts"):
        resumed.seal("fp8", 1, parts=1, config=CONFIG, source="of version 1")


def test_writers_that_disagree_about_a_tensor_are_refused(opened: Store) -> None:
    for part in (0, 1):
        writer = opened.writer("bf16", 0, part=part)
        writer.add("a.weight", tensors(part)["a.weight"])
        writer.close()
    with pytest.raises(StoreError, match=r"disagree about tensor a\.weight"):
        opened.seal("bf16", 0, parts=2, config=CONFIG)


def test_large_versions_are_split_into_files(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FILE_BYTES", 80)
    publish(opened, 0)
    assert len(opened.manifest("bf16", 0).files) == 2
    assert value(opened, 0) == 0


def test_old_versions_are_pruned_with_what_they_left_half_done(opened: Store) -> None:
    for version in range(6):
        publish(opened, version)
    writer = opened.writer("bf16", 6)
    writer.add("a.weight", tensors(6)["a.weight"])
    writer.close()
    assert opened.prune("bf16", 2) == [0, 1, 2, 3]
    assert opened.versions("bf16") == [4, 5, 6]
    assert value(opened, 5) == 5


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "flip":
        data[-5] ^= 4
    elif how == "truncate":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    path.unlink() if how == "missing" else path.write_bytes(data)


@pytest.mark.parametrize("how", ["flip", "truncate", "empty", "missing"])
@pytest.mark.parametrize("file", ["model-a1-p000-00000.safetensors", "manifest.json", "config.json", store.INDEX])
def test_damage_is_found_before_anything_is_served(how: str, file: str, tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    for version in (0, 1):
        publish(opened, version)
    damage(Path(opened.directory("bf16", 1)) / file, how)
    with pytest.raises(StoreError, match="bf16 version 1"):
        delta.stage(opened, "bf16", opened.latest("bf16"), tmp_path / "staged")
    assert opened.rewind(0).latest("bf16").version == 0
    if file == "manifest.json":  # does not exist for anyone
        assert opened.manifest("bf16", 1) is None


@pytest.mark.parametrize("how", ["flip", "truncate", "empty"])
@pytest.mark.parametrize("file", ["latest/bf16", "run.json"])
def test_a_damaged_pointer_or_owner_is_an_error_not_a_fallback(how: str, file: str, tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    publish(opened, 0)
    path = tmp_path / "store" / file
    damage(path, "truncate" if how == "flip" else how)
    with pytest.raises(StoreError, match="damaged"):
        opened.latest("bf16") if file.startswith("latest") else store.init(opened.root, "run")


def test_a_bad_copy_of_a_remote_version_is_fetched_again(tmp_path: Path) -> None:
    opened = store.init(f"memory://copy-{tmp_path.name}-{os.getpid()}", "run")
    publish(opened, 0)
    replica = delta.stage(opened, "bf16", opened.latest("bf16"), tmp_path)
    damage(replica.directory / "model-a1-p000-00000.safetensors", "flip")
    with pytest.raises(StoreError, match="bytes differ"):
        delta.stage(opened, "bf16", opened.latest("bf16"), tmp_path)
    delta.stage(opened, "bf16", opened.latest("bf16"), tmp_path)


def test_a_resume_refuses_a_damaged_checkpoint_version(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    publish(opened, 0)
    damage(Path(opened.directory("bf16", 0)) / "model-a1-p000-00000.safetensors", "flip")
    with pytest.raises(StoreError, match="bytes differ"):
        opened.rewind(0)


def test_a_version_swapped_under_its_pointer_is_refused(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    for version in (0, 1):
        publish(opened, version)
    pointer = opened.latest("bf16")
    manifest = opened.manifest("bf16", 0)
    forged = msgspec.structs.replace(manifest, version=1, digest="")
    forged = msgspec.structs.replace(forged, digest=files.checksum(msgspec.json.encode(forged)))
    (Path(opened.directory("bf16", 1)) / "manifest.json").write_bytes(msgspec.json.encode(forged))
    with pytest.raises(StoreError, match="not the published one"):
        opened.pointed("bf16", pointer)


def test_a_full_disk_is_reported_and_leaves_the_pointer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    publish(opened, 0)
    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real(path)[:4], 0, *real(path)[5:])))
    with pytest.raises(StoreError, match=r"GB free.*keep_versions"):
        publish(opened, 1)
    assert opened.latest("bf16").version == 0


def test_clocks_play_no_part(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    for version, when in ((0, 2e9), (1, 1e9), (2, 1.5e9)):
        publish(opened, version)
        for path in (tmp_path / "store").rglob("*"):
            os.utime(path, (when, when))
    assert opened.latest("bf16").version == 2 and opened.prune("bf16", 1) == [0, 1]


class Life(RuleBasedStateMachine):
    """Any order of publishing, resuming, pruning and dying halfway: the pointer names what was published last."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.store = store.init(self.directory.name + "/store", "run")
        self.newest: int | None = None

    @rule()
    def publish_next(self) -> None:
        self.newest = 0 if self.newest is None else self.newest + 1
        publish(self.store, self.newest)

    @rule()
    def die_before_the_manifest(self) -> None:
        writer = self.store.writer("bf16", 0 if self.newest is None else self.newest + 1)
        writer.add("a.weight", torch.full((4, 8), -1.0).bfloat16())
        writer.close()

    @rule(back=st.integers(0, 3))
    def resume(self, back: int) -> None:
        if self.newest is not None:
            target = max(self.newest - back, 0)
            self.store = self.store.rewind(target)
            kept = [v for v in self.store.versions("bf16") if self.store.manifest("bf16", v)]
            self.newest = target if target in kept else None

    @rule(keep=st.integers(1, 3))
    def prune(self, keep: int) -> None:
        self.store.prune("bf16", keep)

    @invariant()
    def the_pointer_is_true(self) -> None:
        pointer = self.store.latest("bf16")
        assert (pointer.version if pointer else None) == self.newest
        if pointer is not None:
            assert self.store.pointed("bf16", pointer).version == pointer.version
            assert value(self.store, pointer.version) == pointer.version

    def teardown(self) -> None:
        self.directory.cleanup()


Life.TestCase.settings = settings(max_examples=12, stateful_step_count=12, deadline=None)
TestLife = Life.TestCase


def test_pointers_order_by_attempt_first() -> None:
    assert Pointer(1, "r", 2, "").order > Pointer(9, "r", 1, "").order
