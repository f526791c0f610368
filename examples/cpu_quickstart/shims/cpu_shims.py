"""What stock Miles, Megatron-Core and SGLang need to run on a machine without a GPU, in one place.

An affair of this example alone: the package never imports it. Every shim is applied right after the module that it
concerns has been imported, so processes that never import it pay nothing. `MIXPREC_CPU_TRAINER=1` adds the trainer's
part, which maps CUDA devices to the CPU and NCCL to gloo.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

Hook = Callable[[Any], None]
BEFORE: dict[str, Callable[[], None]] = {}
AFTER: dict[str, Hook] = {}


def after(name: str) -> Callable[[Hook], Hook]:
    def register(hook: Hook) -> Hook:
        AFTER[name] = hook
        return hook

    return register


class ShimFinder(importlib.abc.MetaPathFinder):
    """Runs the registered hooks around the first import of a module."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER and name not in BEFORE:
            return None
        before, hook = BEFORE.pop(name, None), AFTER.pop(name, None)
        if before:
            before()
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec and spec.loader and hook:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                hook(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    sys.meta_path.insert(0, ShimFinder())


# ---------------------------------------------------------------- torch

FACTORIES = ("tensor", "as_tensor", "scalar_tensor", "empty", "empty_strided", "zeros", "ones", "full")
FACTORIES += ("arange", "linspace", "eye", "rand", "randn", "randint")


@after("torch")
def torch_shim(torch: Any) -> None:
    # Resolved before the factories are wrapped, or `with torch.device(...)` no longer reaches the wrapped ones.
    from torch.utils._device import _device_constructors

    _device_constructors()
    for name in ("zeros", "empty", "tensor", "empty_like"):
        _wrap(torch, name, drop=("pin_memory",))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    if os.environ.get("MIXPREC_CPU_TRAINER") == "1":
        _cuda_to_cpu(torch)
        _nccl_to_gloo(torch)


def _wrap(owner: Any, name: str, *, drop: tuple[str, ...] = (), cuda: bool = False) -> None:
    original = getattr(owner, name)

    @functools.wraps(original, assigned=("__name__", "__doc__"), updated=())
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for key in drop:
            kwargs.pop(key, None)
        if cuda:
            args = tuple(_cpu(value) for value in args)
            if "device" in kwargs:
                kwargs["device"] = _cpu(kwargs["device"])
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _cpu(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("cuda"):
        return "cpu"
    return "cpu" if getattr(value, "type", None) == "cuda" else value


class _Stream:
    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *args: Any) -> _Stream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None: ...


class _Properties:
    name, major, minor, total_memory, multi_processor_count, uuid = "cpu", 8, 0, 16 << 30, 1, "cpu"


def _constant(value: Any) -> Callable[..., Any]:
    # A function of its own for every name: Dynamo refuses one object under two.
    return lambda *args, **kwargs: value


def _cuda_to_cpu(torch: Any) -> None:
    for name in FACTORIES:
        for variant in (name, f"{name}_like"):
            if hasattr(torch, variant):
                _wrap(torch, variant, cuda=True)
    for name in ("to", "new_zeros", "new_empty", "new_ones", "new_full", "new_tensor"):
        _wrap(torch.Tensor, name, cuda=True)
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    tensor_type = torch.Tensor.type

    def type_(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(self, *args, **kwargs)
        # Megatron's optimizers compare with the names of the CUDA tensor types.
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = type_
    generator = torch.default_generator
    stream = _Stream()
    for name, value in {
        "current_device": lambda: "cpu",
        "device_count": lambda: 8,
        "mem_get_info": lambda *args, **kwargs: (8 << 30, 16 << 30),
        "memory_stats": lambda *args, **kwargs: {},
        "get_device_properties": lambda *args, **kwargs: _Properties(),
        "get_device_capability": lambda *args, **kwargs: (8, 0),
        "get_device_name": lambda *args, **kwargs: "cpu",
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *args, **kwargs: stream,
        "default_stream": lambda *args, **kwargs: stream,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        "device": lambda *args, **kwargs: contextlib.nullcontext(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        "default_generators": {"cpu": generator, 0: generator},
        "_lazy_call": lambda callback, **kwargs: callback(),
        "_lazy_init": lambda: None,
    }.items():
        setattr(torch.cuda, name, value)
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_stream"):
        setattr(torch.cuda, name, _constant(None))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, _constant(0))
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch.cuda.random.set_rng_state = torch.cuda.set_rng_state
    torch.cuda.random._lazy_call = torch.cuda._lazy_call
    torch.cuda.memory._record_memory_history = _constant(None)
    torch._C._host_emptyCache = _constant(None)
    torch._C._cuda_attach_out_of_memory_observer = _constant(None)


def _nccl_to_gloo(torch: Any) -> None:
    import torch.distributed.distributed_c10d as c10d

    def rerouted(name: str) -> Any:
        original = getattr(c10d, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args = tuple("gloo" if value == "nccl" else value for value in args)
            if "nccl" in str(kwargs.get("backend")):
                kwargs["backend"] = "gloo"
            if kwargs.get("device_id") is not None:
                kwargs["device_id"] = None
            if name == "_new_process_group_helper" and "pg_options" in kwargs:
                # Miles compares torch versions as strings, finds 2.13 older than 2.6 and passes the old name.
                kwargs["backend_options"] = kwargs.pop("pg_options")
            return original(*args, **kwargs)

        setattr(c10d, name, wrapped)
        return wrapped

    torch.distributed.init_process_group = rerouted("init_process_group")
    torch.distributed.new_group = rerouted("new_group")
    rerouted("_new_process_group_helper")
    barrier = c10d.barrier

    def plain_barrier(group: Any = c10d.GroupMember.WORLD, async_op: bool = False, device_ids: Any = None) -> Any:
        return barrier(group, async_op)

    c10d.barrier = torch.distributed.barrier = plain_barrier


def _declare_vision_ops() -> None:
    # The torchvision wheel on PyPI is built for CUDA; its Python part only needs these two schemas to import.
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.modules[__name__].__dict__["_vision_library"] = library  # the schemas live as long as the object


BEFORE["torchvision"] = _declare_vision_ops


# ---------------------------------------------------------------- SGLang


@after("sglang.srt.mem_cache.pool_host.common")
def host_pool_shim(module: Any) -> None:
    module._cuda_host_register = lambda *args, **kwargs: None


@after("sglang.srt.entrypoints.engine")
def fork_shim(module: Any) -> None:
    """SGLang spawns its processes for CUDA's sake. Forked, each saves ten seconds of imports."""
    set_start_method = module.mp.set_start_method
    module.mp.set_start_method = lambda method, force=False: set_start_method("fork", force)


# ---------------------------------------------------------------- Megatron-Core and Miles


@after("megatron.core.transformer.moe.moe_utils")
def moe_shim(module: Any) -> None:
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None  # read, never called, without Transformer Engine

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # The original only converts CUDA tensors; the dispatcher needs plain split sizes.
        return tensor.detach().numpy() if as_numpy and hasattr(tensor, "detach") else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


@after("megatron.core.optimizer.distrib_optimizer")
def optimizer_shim(module: Any) -> None:
    """Torch's Adam has no state before its first step; Megatron reads the step of that state to load a checkpoint."""
    import torch

    stock = module.DistributedOptimizer.sharded_state_dict

    @functools.wraps(stock)
    def sharded_state_dict(
        self: Any, model_sharded_state_dict: Any, is_loading: bool = False, *args: Any, **kw: Any
    ) -> Any:
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"] if is_loading):
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state.setdefault(parameter, {"step": torch.tensor(0.0), **moments})
        return stock(self, model_sharded_state_dict, is_loading, *args, **kw)

    module.DistributedOptimizer.sharded_state_dict = sharded_state_dict


@after("miles.utils.reloadable_process_group")
def process_group_shim(module: Any) -> None:
    module.monkey_patch_torch_dist = lambda: None  # only for offloading NCCL groups


@after("miles.backends.megatron_utils.megatron_to_hf.qwen3moe")
def qwen3moe_names_shim(module: Any) -> None:
    """Parameter names of Megatron's local layer spec, which the converter knows only from Transformer Engine."""
    original = module.convert_qwen3moe_to_hf

    def convert(args: Any, name: str, param: Any) -> Any:
        name = re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1", name)
        layer = re.match(r"module\.module\.decoder\.layers\.(\d+)\.input_layernorm\.weight", name)
        if layer:
            return [(f"model.layers.{layer[1]}.input_layernorm.weight", param)]
        return original(args, name, param)

    module.convert_qwen3moe_to_hf = convert


@after("sglang.srt.mem_cache.kv_cache_configurator")
def fp8_kv_cache(module: Any) -> None:
    """torch_native casts what it reads, so an FP8 KV cache works on any CPU; SGLang 0.5.23 lets only AMX through."""
    module.cpu_has_amx_support = lambda: True
    module.attention_backends = lambda: {"intel_amx"}
    module.KVCacheConfigurator._build_mha_quant_method = lambda self, *, num_layers: None


class _P2PStubLoader(importlib.abc.Loader):
    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["UpdateWeightP2P"] = type("UpdateWeightP2P", (), {})


class _P2PStubFinder(importlib.abc.MetaPathFinder):
    """Miles imports its RDMA updater unconditionally; that one needs a fork of SGLang and is not used here."""

    NAME = "miles.backends.megatron_utils.update_weight.update_weight_from_distributed.p2p"

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, _P2PStubLoader()) if name == self.NAME else None


sys.meta_path.insert(0, _P2PStubFinder())
