"""Writers killed (SIGKILL) before each write, in the middle of each write, and before each fsync and rename.

A forked child counts these events and dies at the k-th; the parent then looks at the store, and does the work again.
"""

from __future__ import annotations

import itertools
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import weight_models as models

from miles_mixprec.errors import StoreError
from miles_mixprec.weights import delta, encode, files, store
from miles_mixprec.weights.store import Store

VIEWS = ["fp8", "nvfp4"]


def dies_at(event: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child that is killed at its `event`-th event. Returns whether it was."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # torch's thread pool does not survive a fork
        _plant(event)
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed by itself"
    return os.WIFSIGNALED(status)


def _plant(event: int) -> None:
    counter = itertools.count()

    def tick() -> None:
        if next(counter) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    fsync, replace, unlink, save = os.fsync, os.replace, os.unlink, safetensors.torch.save_file

    def counted(call: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **options: object) -> object:
            tick()
            return call(*arguments, **options)

        return wrapped

    def save_in_halves(tensors: dict[str, torch.Tensor], path: str, metadata: dict[str, str]) -> None:
        tick()
        save(tensors, path, metadata)
        size = os.path.getsize(path)
        data = Path(path).read_bytes()
        os.truncate(path, size // 2)
        tick()
        Path(path).write_bytes(data)

    os.fsync, os.replace, os.unlink, os.remove = counted(fsync), counted(replace), counted(unlink), counted(unlink)
    safetensors.torch.save_file = save_in_halves


def checksums(opened: Store, view: str, version: int) -> dict[str, str]:
    manifest = opened.manifest(view, version)
    assert manifest is not None
    return {name: entry.xxh3 for name, entry in manifest.tensors.items()}


def test_a_publisher_killed_anywhere_shows_the_old_version_or_the_new_one(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    opened.publish("bf16", 0, models.moe(0, experts=1).items(), models.CONFIG)
    for version in itertools.count(1):
        tensors = models.moe(version, experts=1)
        publish = lambda: opened.publish("bf16", version, tensors.items(), models.CONFIG)  # noqa: B023, E731
        killed = dies_at(version - 1, publish)
        pointer = opened.latest("bf16")
        assert pointer is not None and pointer.version in ((version - 1, version) if killed else (version,))
        staged = delta.stage(opened, "bf16", pointer, tmp_path / "staged")
        expected = models.moe(pointer.version, experts=1)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in staged.read())
        if not killed:
            break
        publish()
        assert opened.latest("bf16").version == version
        opened.prune("bf16", 2)
    assert version > 12  # write, fsync and rename of every file, config, index, manifest and pointer


@pytest.mark.parametrize("anchor_every", [0, 1000])
def test_an_encoder_killed_anywhere_is_made_good_by_the_next(anchor_every: int, tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    scratch = tmp_path / "scratch"
    for version in itertools.count():
        opened.publish("bf16", version, models.moe(version, experts=1).items(), models.CONFIG)
        source = opened.latest("bf16")
        work = lambda: encode.encode_version(opened, source, VIEWS, scratch, anchor_every=anchor_every)  # noqa: B023, E731
        killed = version > 0 and dies_at(version - 1, work)
        for view in VIEWS:
            pointer = opened.latest(view)
            assert (pointer is None) if version == 0 else pointer.version in (version - 1, version)
            if pointer is not None:
                opened.pointed(view, pointer)
        todo = encode.behind(opened, source, VIEWS)
        assert killed or version == 0 or not todo
        encode.encode_version(opened, source, todo, scratch, anchor_every=anchor_every)
        for view in VIEWS:
            replica = delta.stage(opened, view, opened.latest(view), tmp_path / "staged" / view)
            assert replica.manifest.version == version and replica.manifest.source == source.manifest
            opened.prune(view, 2)
        if version > 0 and not killed:
            break
    assert version > 20


def test_a_resume_killed_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    for event in itertools.count():
        opened = store.init(str(tmp_path / f"store{event}"), "run")
        for version in range(4):
            opened.publish("bf16", version, models.moe(version, experts=1).items(), models.CONFIG)
        killed = dies_at(event, lambda: opened.rewind(1))  # noqa: B023
        resumed = store.init(opened.root, "run").rewind(1)
        pointer = resumed.latest("bf16")
        assert pointer is not None and (pointer.version, pointer.attempt) == (1, resumed.attempt)
        assert resumed.versions("bf16") == [0, 1]
        resumed.publish("bf16", 2, models.moe(7, experts=1).items(), models.CONFIG)
        assert checksums(resumed, "bf16", 2)["lm_head.weight"] == files.tensor_checksum(
            models.moe(7)["lm_head.weight"]
        )
        with pytest.raises(StoreError, match="must stop writing"):
            opened.publish("bf16", 9, models.moe(9, experts=1).items(), models.CONFIG)
        if not killed:
            break
    assert event > 5


def test_a_writer_left_over_from_an_ended_attempt_cannot_touch_the_next_one_s_version(tmp_path: Path) -> None:
    old = store.init(str(tmp_path / "store"), "run")
    old.publish("bf16", 0, models.moe(0, experts=1).items(), models.CONFIG)
    late = old.writer("bf16", 1)
    new = old.rewind(0)
    new.publish("bf16", 1, models.moe(2, experts=1).items(), models.CONFIG)
    late.add("model.norm.weight", models.moe(3)["model.norm.weight"])
    with pytest.raises(StoreError, match="must stop writing"):
        late.close()
    replica = delta.stage(new, "bf16", new.latest("bf16"), tmp_path / "staged")
    assert torch.equal(dict(replica.read())["model.norm.weight"], models.moe(2)["model.norm.weight"])


def test_a_disk_that_fills_up_midway_is_reported_and_nothing_half_written_is_seen(tmp_path: Path) -> None:
    opened = store.init(str(tmp_path / "store"), "run")
    opened.publish("bf16", 0, models.moe(0, experts=1).items(), models.CONFIG)

    def publish_with_a_file_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
        with pytest.raises(StoreError, match="cannot write"):
            opened.publish("bf16", 1, models.moe(1, experts=1).items(), models.CONFIG)

    assert not dies_at(10**9, publish_with_a_file_limit)
    assert opened.latest("bf16").version == 0 and opened.manifest("bf16", 1) is None
    assert not list((tmp_path / "store").rglob("*.tmp"))
    opened.publish("bf16", 1, models.moe(1, experts=1).items(), models.CONFIG)
