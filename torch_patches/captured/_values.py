"""Values inside a captured graph as JSON and back: arguments, fake tensors, descriptors.

JSON scalars stand for themselves and a JSON array for a list; everything else is an object with one
telling key, such as ``{"node": "mm"}`` or ``{"dtype": "bfloat16"}``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
import torch.utils._pytree as pytree
from torch._functorch._aot_autograd import descriptors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torch_patches.captured._meshes import CapturedMesh, MeshEncoder, describe_mesh
from torch_patches.captured._symbols import (
    SYMBOLIC_TYPES,
    SymbolDecoder,
    SymbolEncoder,
    check_integer,
)
from torch_patches.captured._targets import (
    CaptureFormatError,
    TargetDecoder,
    encode_target,
)


@dataclass(frozen=True)
class OpaqueValue:
    """Stands for a graph input that is not a tensor, such as a DeviceMesh.

    Args:
        type_name: of the object's class.
        mesh: of a DeviceMesh, what is known of it.
    """

    type_name: str
    mesh: CapturedMesh | None = None


# ---------------------------------------------------------------------------------------- encoding


class ValueEncoder:
    """Encodes the values of one file; collects the symbols it meets."""

    def __init__(self) -> None:
        self.symbols = SymbolEncoder()
        self.meshes = MeshEncoder()
        self._storages: dict[int, int] = {}

    @contextlib.contextmanager
    def graph_scope(self, module: fx.GraphModule) -> Iterator[None]:
        """Within it, tensors of ``module`` that share a storage say so."""
        counts = Counter(
            storage
            for node in module.graph.nodes
            for value in pytree.tree_leaves(node.meta.get("val"))
            if (storage := _storage_key(value)) is not None
        )
        shared = (storage for storage, count in counts.items() if count > 1)
        outer, self._storages = self._storages, {key: i for i, key in enumerate(shared)}
        try:
            yield
        finally:
            self._storages = outer

    def argument(self, value: Any) -> Any:
        """An argument of a node."""
        if isinstance(value, fx.Node):
            return {"node": value.name}
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if isinstance(value, tuple):
            return {"tuple": [self.argument(item) for item in value]}
        if isinstance(value, Mapping):
            return {"dict": {key: self.argument(item) for key, item in value.items()}}
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return {"slice": [self.argument(part) for part in parts]}
        if isinstance(value, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
            return {"target": encode_target(value)}
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(value)}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, SYMBOLIC_TYPES):
            return self.symbols.encode(value)
        group_name = getattr(value, "group_name", None)
        if isinstance(group_name, str):  # a process group object: its name says the same
            return group_name
        return self._opaque(value)

    def _opaque(self, value: Any) -> dict[str, Any]:
        known = isinstance(value, OpaqueValue)
        mesh = value.mesh if known else describe_mesh(value)
        encoded = {"opaque": value.type_name if known else _type_name(value)}
        return encoded if mesh is None else {**encoded, "mesh": self.meshes.index(mesh)}

    def value(self, value: Any) -> Any:
        """A node's ``meta["val"]``."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, tuple):
            return {"tuple": [self.value(item) for item in value]}
        return self._leaf(value)

    def _dims(self, dims: Any) -> list[Any]:
        return [self._leaf(dim) for dim in dims]

    def _tensor(self, value: torch.Tensor) -> dict[str, Any]:
        if value.layout != torch.strided:
            return {"opaque": _type_name(value)}
        encoded: dict[str, Any] = {
            "shape": self._dims(value.shape),
            "stride": self._dims(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
        }
        offset = self._leaf(value.storage_offset())
        if offset != 0:
            encoded["offset"] = offset
        storage = _storage_key(value)
        if storage in self._storages:
            encoded["storage"] = self._storages[storage]
        return encoded

    def descriptor(self, value: Any) -> Any:
        """An AOTAutograd input or output descriptor (or what it holds)."""
        if isinstance(value, descriptors.AOTInput | descriptors.AOTOutput):
            fields = {
                field.name: self.descriptor(getattr(value, field.name))
                for field in dataclasses.fields(value)  # type: ignore[arg-type]
            }
            return {"descriptor": type(value).__name__, **fields}
        if isinstance(value, list | tuple):
            return [self.descriptor(item) for item in value]
        return value if value is None or isinstance(value, int | str) else _type_name(value)


def _storage_key(value: Any) -> int | None:
    """Identity of a tensor's storage: views share it in a traced graph, and memory estimates read
    that.  None with symbolic sizes: rebuilding the sharing would ask torch to compare them."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    if _is_symbolic(*value.shape, *value.stride(), value.storage_offset()):
        return None
    return value.untyped_storage()._cdata


def _is_symbolic(*values: Any) -> bool:
    return not all(isinstance(value, int) for value in values)


def _type_name(value: Any) -> str:
    # A fake script object says what it stands for only here.
    real = getattr(value, "script_class_name", None)
    return real.rsplit(".", 1)[-1] if isinstance(real, str) else type(value).__name__


# ---------------------------------------------------------------------------------------- decoding


class ValueDecoder:
    """Rebuilds the values of one file, all in one fake mode."""

    def __init__(
        self,
        hints: Mapping[str, int | None],
        targets: TargetDecoder,
        meshes: Sequence[CapturedMesh] = (),
    ) -> None:
        self._meshes = meshes
        self._symbols = SymbolDecoder(hints)
        self.fake_mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=self._symbols.shape_env
        )
        self._targets = targets
        self._storages: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    @contextlib.contextmanager
    def graph_scope(self) -> Iterator[None]:
        """Storages are shared within one graph."""
        outer, self._storages = self._storages, {}
        try:
            yield
        finally:
            self._storages = outer

    def argument(self, encoded: Any, nodes: Mapping[str, fx.Node]) -> Any:
        """An argument of a node, given the nodes before it."""
        if isinstance(encoded, list):
            return [self.argument(item, nodes) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        kind, content = next(iter(encoded.items()))
        if kind == "node":
            return nodes[content]
        if kind == "tuple":
            return tuple(self.argument(item, nodes) for item in content)
        if kind == "dict":
            return {key: self.argument(item, nodes) for key, item in content.items()}
        if kind == "slice":
            return slice(*(self.argument(part, nodes) for part in content))
        return self._leaf(encoded)

    def _leaf(self, encoded: Any) -> Any:
        if not isinstance(encoded, dict):
            return encoded
        kind, content = next(iter(encoded.items()))
        if kind == "sym":
            return self._symbols.decode(encoded)
        if kind == "target":
            return self._targets.decode(content)
        if kind == "float":
            return float(content)
        if kind == "complex":
            return complex(*content)
        if kind == "device" and isinstance(content, str):
            return torch.device(content)
        if kind in ("dtype", "layout", "memory_format"):
            return _torch_constant(content, getattr(torch, kind))
        if kind == "opaque" and isinstance(content, str):
            mesh = check_integer(encoded["mesh"]) if "mesh" in encoded else None
            return OpaqueValue(content, None if mesh is None else self._meshes[mesh])
        raise CaptureFormatError(f"unknown value {str(encoded)[:200]}")

    def value(self, encoded: Any) -> Any:
        """A node's ``meta["val"]``."""
        if isinstance(encoded, list):
            return [self.value(item) for item in encoded]
        if isinstance(encoded, dict) and "shape" in encoded:
            return self.tensor(encoded)
        if isinstance(encoded, dict) and "tuple" in encoded:
            return tuple(self.value(item) for item in encoded["tuple"])
        return self._leaf(encoded)

    def tensor(self, encoded: dict[str, Any]) -> FakeTensor:
        dtype = _torch_constant(encoded["dtype"], torch.dtype)
        device = _tensor_device(encoded["device"])
        shape = [self._leaf(dim) for dim in encoded["shape"]]
        stride = [self._leaf(dim) for dim in encoded["stride"]]
        offset = self._leaf(encoded.get("offset", 0))
        meta = self._meta_tensor(shape, stride, offset, dtype)
        if "storage" in encoded and not _is_symbolic(*shape, *stride, offset):
            key = check_integer(encoded["storage"]), device
            storage = self._storages.setdefault(key, meta.untyped_storage())
            with torch.no_grad():
                meta.set_(storage, offset, shape, stride)  # type: ignore[call-overload]
        return FakeTensor(self.fake_mode, meta, device)

    @staticmethod
    def _meta_tensor(
        shape: list[Any], stride: list[Any], offset: Any, dtype: torch.dtype
    ) -> torch.Tensor:
        if isinstance(offset, int) and offset == 0:
            return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        base = torch.empty(offset + last + 1, dtype=dtype, device="meta")
        return base.as_strided(shape, stride, offset)

    def descriptor(self, encoded: Any) -> Any:
        if isinstance(encoded, list):
            return [self.descriptor(item) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        fields = dict(encoded)
        name = fields.pop("descriptor")
        found = getattr(descriptors, name, None) if isinstance(name, str) else None
        known = (descriptors.AOTInput, descriptors.AOTOutput)
        if not (isinstance(found, type) and issubclass(found, known)):
            raise CaptureFormatError(f"unknown descriptor {str(name)[:200]!r}")
        return found(**{key: self.descriptor(item) for key, item in fields.items()})


def _torch_constant(name: Any, kind: type) -> Any:
    constant = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(constant, kind):
        raise CaptureFormatError(f"not a {kind.__name__}: {str(name)[:200]!r}")
    return constant


def _tensor_device(name: Any) -> torch.device:
    if not isinstance(name, str):
        raise CaptureFormatError(f"not a device: {str(name)[:200]!r}")
    device = torch.device(name)
    # A fake tensor needs an index; asking the runtime for the current one would initialise it.
    needs_index = device.index is None and device.type not in ("cpu", "meta")
    return torch.device(device.type, 0) if needs_index else device
