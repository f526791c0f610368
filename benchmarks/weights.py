"""What weight views cost: each encoder against the reference paths, deltas, the store, memory.

    python benchmarks/weights.py [--rows 4096] [--repeat 3] [--markdown]

One core. References: torchao (`to_mx`, `nvfp4_quantize`), compressed-tensors (`quantize` and its packing) and the
quantisers of Miles 0.0.2: the Transformer Engine reference for NVFP4 and the conversion rule of its FP8 tool, with the
same arithmetic in eager torch where they need a GPU. GB/s count the BF16 bytes that go in. A reference that is not
installed has no column. Projections take one 35B model, 70 GB of BF16, over as many cores as stated.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from miles_mixprec.weights import delta, encode, formats, store

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
    found: dict[str, Callable[[Tensor], object]] = {}
    if view == "fp8":
        found["eager torch"] = fp8_blocks_eager
    try:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        found |= {
            "mxfp8": {"torchao": lambda w: to_mx(w, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)},
            "mxfp4": {"torchao": lambda w: to_mx(w, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.EVEN)},
            "nvfp4": {"torchao": lambda w: nvfp4_quantize(w, 16, w.abs().max().float() / 2688)},
        }.get(view, {})
    except ImportError:
        pass
    try:
        found |= {"compressed-tensors": c} if (c := compressed_tensors_path(view)) else {}
    except ImportError:
        pass
    return found


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


OURS: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], Callable[[], object]]]] = {
    "fp8": (formats.encode_fp8, lambda w: lambda e=formats.encode_fp8(w): formats.decode_fp8(*e)),
    "mxfp8": (formats.encode_mxfp8, lambda w: lambda e=formats.encode_mxfp8(w): formats.decode_mxfp8(*e)),
    "mxfp4": (formats.encode_mxfp4, lambda w: lambda e=formats.encode_mxfp4(w): formats.decode_mxfp4(*e)),
    "nvfp4": (
        lambda w: formats.encode_nvfp4(w, w.abs().max().float()),
        lambda w: lambda e=formats.encode_nvfp4(w, w.abs().max().float()): formats.decode_nvfp4(*e),
    ),
}


def encoders(rows: int, repeat: int) -> list[list[str]]:
    weight = (torch.randn(rows, 2048, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    table = []
    for view, (ours, decoder) in OURS.items():
        rate = weight.nbytes / best_seconds(lambda: ours(weight), repeat) / 1e9  # noqa: B023
        decoding = weight.nbytes / best_seconds(decoder(weight), repeat) / 1e9
        others = {}
        for name, reference in references(view).items():
            try:
                reference(weight)
            except Exception as error:
                print(f"{view}: {name} does not run here: {' '.join(str(error).split())[:120]}")
                continue
            others[name] = weight.nbytes / best_seconds(lambda: reference(weight), repeat) / 1e9  # noqa: B023
        fastest = max(others.values(), default=float("nan"))
        seconds = [f"{MODEL_BYTES / 1e9 / rate / cores:.1f}" for cores in (16, 64)]
        table.append(
            [
                view,
                f"{rate:.3f}",
                ", ".join(f"{n} {r:.3f}" for n, r in others.items()) or "-",
                f"{rate / fastest:.1f}x",
            ]
            + [f"{decoding:.3f}", *seconds]
        )
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
            writer = opened.writer("bf16", 1, base=0)
            for name, tensor in model.items():
                delta.add_tensor(writer, name, tensor, base)
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


def memory(rows: int) -> str:
    """Peak resident memory of encoding a mapped BF16 version of several sizes, beyond what the process had before."""
    grown = []
    for layers in (4, 16):
        root = Path(tempfile.mkdtemp())
        try:
            opened = store.init(str(root / "store"), "bench")
            tensors = ((f"m.{i}.q_proj.weight", torch.randn(rows, 2048).bfloat16()) for i in range(layers))
            opened.publish("bf16", 0, tensors, {})
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            encode.encode_version(opened, opened.latest("bf16"), ["fp8"], root / "scratch")
            size = layers * rows * 2048 * 2
            grown.append(
                f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10:.0f} MiB at {size / 2**20:.0f} MiB"
            )
        finally:
            shutil.rmtree(root)
    return ", ".join(grown)


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
    print(f"peak memory of an encoder beyond its start: {memory(options.rows)}")


if __name__ == "__main__":
    main()
