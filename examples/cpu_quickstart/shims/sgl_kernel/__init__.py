"""Stands in for SGLang's CUDA kernels, which have no CPU wheel: any name imports, calling one raises.

No operators are registered, so SGLang finds no AMX kernels and takes its native torch paths.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0"


class MissingKernel:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} has no CPU implementation")

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


def _attribute_of(module: str) -> Any:
    def attribute(name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{module}.{name}")

    return attribute


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__.update(__getattr__=_attribute_of(spec.name), __path__=[])
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


__getattr__ = _attribute_of("sgl_kernel")
sys.meta_path.insert(0, _SubmoduleFinder())
