"""What weight views cost: each encoder against the reference paths, deltas, the store, memory.

    python benchmarks/weights.py [--rows 4096] [--repeat 3]

One core. References: torchao (`to_mx`, `nvfp4_quantize`), compressed-tensors (`quantize` and its packing) and the
quantisers of Miles 0.0.2: its FP8 rule in eager torch, because its kernel needs a GPU, and for NVFP4 the Transformer
Engine reference that it calls (TRANSFORMER_ENGINE_SOURCE: the `transformer_engine` folder of an unpacked wheel). GB/s
count the BF16 bytes that go in. What is not installed is left out. Projections: 35B parameters, 70 GB of BF16.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_mixprec.weights import delta, formats, store

MODEL_BYTES = 70e9


def best_seconds(work: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def fp8_blocks_eager(weight: Tensor) -> tuple[Tensor, Tensor]:
    """128x128 blocks in eager torch, the rule of Miles' kernel: what a CPU runs without an encoder of its own."""
    n, k = weight.shape
    padded = F.pad(weight, (0, -k % 128, 0, -n % 128)).float()
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-10) / 448
    data = (blocks * (1 / scale)).clamp(-448, 448).view(padded.shape)[:n, :k].to(torch.float8_e4m3fn)
    return data, scale[:, 0, :, 0]


def references(view: str) -> dict[str, Callable[[Tensor], object]]:
    """Other implementations of a view's encoder, by name."""
    found: dict[str, Callable[[Tensor], object]] = {"fp8": {"Miles' rule, eager": fp8_blocks_eager}}.get(view, {})
    with contextlib.suppress(ImportError):
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        found |= {
            "mxfp8": {"torchao": lambda w: to_mx(w, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)},
            "mxfp4": {"torchao": lambda w: to_mx(w, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.EVEN)},
            "nvfp4": {"torchao": lambda w: nvfp4_quantize(w, 16, w.abs().max().float() / 2688)},
        }.get(view, {})
    with contextlib.suppress(ImportError):
        found["compressed-tensors"] = compressed_tensors_path(view)
    if view == "nvfp4" and "TRANSFORMER_ENGINE_SOURCE" in os.environ:
        found["Transformer Engine reference (Miles 0.0.2)"] = transformer_engine_path()
    return found


def transformer_engine_path() -> Callable[[Tensor], object]:
    """Miles 0.0.2's NVFP4 quantiser, from an unpacked wheel: the package itself does not import without CUDA."""
    path = Path(os.environ["TRANSFORMER_ENGINE_SOURCE"]) / "pytorch" / "custom_recipes" / "reference_nvfp4.py"
    for name in ("", ".pytorch", ".pytorch.custom_recipes", ".pytorch.quantized_tensor"):
        sys.modules["transformer_engine" + name] = mock = MagicMock()
        mock.Quantizer = mock.QuantizedTensorStorage = object
    spec = importlib.util.spec_from_file_location("reference_nvfp4", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["reference_nvfp4"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    quantize = module.NVFP4QuantizerRef._quantize_blockwise_reference
    return lambda w: quantize(w, w.abs().max().float(), 16, 1, pow_2_scales=False, eps=0.0)


def compressed_tensors_path(view: str) -> Callable[[Tensor], object]:
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import generate_mx_scales

    float_args = {"type": "float", "symmetric": True}
    if view == "fp8":
        args = QuantizationArgs(num_bits=8, strategy="block", block_structure=[128, 128], **float_args)

        def fp8(weight: Tensor) -> object:
            n, k = weight.shape
            scale = weight.view(n // 128, 128, k // 128, 128).abs().amax((1, 3)).float() / 448
            return quantize(weight, scale, torch.zeros(1), args, dtype=torch.float8_e4m3fn), scale

        return fp8
    bits, group = (8, 32) if view == "mxfp8" else (4, 32) if view == "mxfp4" else (4, 16)
    strategy = "tensor_group" if view == "nvfp4" else "group"
    args = QuantizationArgs(num_bits=bits, strategy=strategy, group_size=group, **float_args)

    def grouped(weight: Tensor) -> object:
        amax = weight.unflatten(1, (-1, group)).abs().amax(-1).float()
        if view == "nvfp4":
            global_scale = 2688 / amax.max()
            scale = (amax * (global_scale / 6)).to(torch.float8_e4m3fn)
            data = quantize(weight, scale.float(), None, args, global_scale=global_scale)
        else:
            scale = generate_mx_scales(amax, bits)
            data = quantize(weight, 2.0 ** (scale - 127), None, args)
        return (pack_fp4_to_uint8(data) if bits == 4 else data.to(torch.float8_e4m3fn)), scale

    return grouped


def encode_nvfp4(weight: Tensor) -> tuple[Tensor, ...]:
    low, high = weight.aminmax()
    return formats.encode_nvfp4(weight, torch.maximum(-low, high).float())


OURS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "fp8": (formats.encode_fp8, formats.decode_fp8),
    "mxfp8": (formats.encode_mxfp8, formats.decode_mxfp8),
    "mxfp4": (formats.encode_mxfp4, formats.decode_mxfp4),
    "nvfp4": (encode_nvfp4, formats.decode_nvfp4),
}


def encoders(rows: int, repeat: int) -> list[list[str]]:
    weight = (torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    table = []
    for view, (encode_matrix, decode_matrix) in OURS.items():
        work: dict[str, Callable[[], object]] = {"ours": partial(encode_matrix, weight)}
        work["decode"] = partial(decode_matrix, *encode_matrix(weight))
        work |= {name: partial(reference, weight) for name, reference in references(view).items()}
        rates = {name: weight.nbytes / best_seconds(call, repeat) / 1e9 for name, call in work.items()}
        ours, decoding = rates.pop("ours"), rates.pop("decode")
        others = ", ".join(f"{name} {rate:.3f}" for name, rate in rates.items())
        ratio = f"{ours / max(rates.values()):.1f}x"
        projected = [f"{MODEL_BYTES / 1e9 / ours / cores:.1f}" for cores in (16, 64)]
        table.append([view, f"{ours:.3f}", others, ratio, f"{decoding:.3f}", *projected])
    return table


def versions(rows: int) -> list[list[str]]:
    """A BF16 version through the store as a whole and as a delta, in which 2% of the elements changed."""
    root = Path(tempfile.mkdtemp())
    generator = torch.Generator().manual_seed(0)
    model = {f"l.{i}.weight": (torch.randn(rows, 2048, generator=generator) * 0.02).bfloat16() for i in range(8)}
    size = sum(tensor.nbytes for tensor in model.values())
    try:
        opened = store.init(str(root / "store"), "bench")
        timed: dict[str, float] = {}

        def measure(name: str, work: Callable[[], object]) -> None:
            start = time.perf_counter()
            work()
            timed[name] = time.perf_counter() - start

        measure("publish", lambda: opened.publish("bf16", 0, model.items(), {}))
        measure("stage and verify", lambda: delta.stage(opened, "bf16", opened.latest("bf16"), root / "scratch"))
        base = delta.stage(opened, "bf16", opened.latest("bf16"), root / "scratch", verify=False)
        for tensor in model.values():
            tensor += (torch.rand(tensor.shape, generator=generator) < 0.02).bfloat16() * 1e-3

        def publish_delta() -> None:
            writer = opened.writer("bf16", 1, base=base)
            for name, tensor in model.items():
                writer.add(name, tensor)
            writer.close()
            opened.seal("bf16", 1, parts=1, config={})

        measure("publish delta", publish_delta)
        measure(
            "apply delta and verify", lambda: delta.stage(opened, "bf16", opened.latest("bf16"), root / "follower")
        )
        stats = opened.manifest("bf16", 1).stats
        print(
            f"delta: {stats['changed_bytes'] / stats['total_bytes']:.3f} of the bytes changed, "
            f"{stats['wire_bytes'] / stats['total_bytes']:.3f} of them travel"
        )
        return [[name, f"{size / seconds / 1e9:.2f}"] for name, seconds in timed.items()]
    finally:
        shutil.rmtree(root)


MEMORY = """
import sys, threading, time
from pathlib import Path
from miles_mixprec.weights import encode, store
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1])
root = Path(sys.argv[1])
store.FILE_BYTES = 32 << 20
opened = store.init(str(root / "store"), "bench")
before, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
encode.encode_version(opened, opened.latest("bf16"), ["fp8", "nvfp4"], root / "scratch")
done.set()
thread.join()
print(max(peak[0] - before, 0) // 1024)
"""


def memory(rows: int) -> str:
    """Peak private memory of a process that encodes two views with files of 32 MiB, for models of several sizes."""
    peaks = []
    for matrices in (4, 32):
        root = Path(tempfile.mkdtemp())
        try:
            opened = store.init(str(root / "store"), "bench")
            names = (f"m.{i}.mlp.up_proj.weight" for i in range(matrices))
            opened.publish("bf16", 0, ((name, torch.randn(rows, 2048).bfloat16()) for name in names), {})
            run = subprocess.run([sys.executable, "-c", MEMORY, str(root)], capture_output=True, text=True, check=True)
            peaks.append(f"{run.stdout.strip()} MiB for a model of {matrices * rows * 2048 * 2 >> 20} MiB")
        finally:
            shutil.rmtree(root)
    return ", ".join(peaks)


def show(header: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="of the matrix with 2,048 columns")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    show(
        [
            "view",
            "GB/s per core",
            "references, GB/s",
            "ratio to fastest",
            "decode GB/s",
            "35B on 16 cores, s",
            "64 cores, s",
        ],
        encoders(options.rows, options.repeat),
    )
    show(["step", "GB/s of BF16"], versions(options.rows))
    print(f"peak private memory of an encoder: {memory(options.rows)}")


if __name__ == "__main__":
    main()
