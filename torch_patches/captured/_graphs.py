"""Graphs of a capture as JSON and back: nodes, attributes, the metadata that passes read.

Strings that become source text of a loaded module's ``forward`` (names of nodes, placeholders,
attributes and keyword arguments) are checked to be identifiers on loading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from torch_patches.captured._marks import decode_marks, encode_marks
from torch_patches.captured._meshes import CapturedMesh
from torch_patches.captured._modules import (
    ModuleStackEncoder,
    decode_module_stacks,
    is_identifier,
)
from torch_patches.captured._targets import (
    CaptureFormatError,
    TargetDecoder,
    encode_target,
)
from torch_patches.captured._values import ValueDecoder, ValueEncoder

# Kept as they are: JSON scalars.
_PLAIN_META = ("ac_graph_id", "partitioner_tag", "seq_nr", "autograd_backward", "is_backward")
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_MAX_CUSTOM_DEPTH = 16
#: At the start of a text or behind a space or quote: /home/..., ~/..., C:\...
_LOCAL_PATH = re.compile(r"""(?:^|[\s"'=:,(])(?:/[^/\s]+/|~/|[A-Za-z]:\\)""")


class GraphEncoder:
    """Encodes the graphs of one file.

    ``stacks`` collects the distinct module stacks.
    """

    def __init__(self) -> None:
        self.values = ValueEncoder()
        self.stacks = ModuleStackEncoder()

    def graph(self, module: fx.GraphModule) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        for node in module.graph.find_nodes(op="get_attr"):
            if node.target not in attributes:
                attributes[node.target] = self._attribute(module, node.target)
        with self.values.graph_scope(module):
            nodes = [self._node(node) for node in module.graph.nodes]
        return {"nodes": nodes, "attributes": attributes}

    def _attribute(self, module: fx.GraphModule, name: str) -> dict[str, Any]:
        attribute = getattr(module, name, None)
        if isinstance(attribute, fx.GraphModule):
            return {"graph": self.graph(attribute)}
        if isinstance(attribute, torch.Tensor):
            return {"tensor": self.values.value(attribute)}
        raise CaptureFormatError(f"a captured graph cannot hold the attribute {name}")

    def _node(self, node: fx.Node) -> dict[str, Any]:
        encoded: dict[str, Any] = {"name": node.name, "op": node.op}
        if node.op == "call_function":
            encoded["target"] = encode_target(node.target)
        elif node.op in ("placeholder", "get_attr", "output"):
            encoded["target"] = node.target
        else:
            raise CaptureFormatError(f"a captured graph cannot hold {node.op} nodes")
        argument = self.values.argument
        if node.args:
            encoded["args"] = [argument(item) for item in node.args]
        if node.kwargs:
            encoded["kwargs"] = {key: argument(item) for key, item in node.kwargs.items()}
        if "val" in node.meta:
            encoded["val"] = self.values.value(node.meta["val"])
        meta = self._meta(node.meta)
        if marks := encode_marks(node):
            meta["marks"] = marks
        if meta:
            encoded["meta"] = meta
        return encoded

    def _meta(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        encoded = {
            key: meta[key] for key in _PLAIN_META if isinstance(meta.get(key), bool | int | str)
        }
        if isinstance(meta.get("recompute"), CheckpointPolicy):
            encoded["recompute"] = meta["recompute"].name
        for key in _STACKS:
            if meta.get(key):
                encoded[key] = self.stacks.index(meta[key])
        if isinstance(meta.get("custom"), dict):
            encoded["custom"] = _plain(meta["custom"], _MAX_CUSTOM_DEPTH)
        if meta.get("desc") is not None:
            encoded["desc"] = self.values.descriptor(meta["desc"])
        return encoded


def _plain(value: Any, depth: int) -> Any:
    """What JSON can hold of user metadata; the rest, and paths of this machine, become None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str) and _LOCAL_PATH.search(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping) and depth:
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple) and depth:
        return [_plain(item, depth - 1) for item in value]
    return None


class GraphDecoder:
    """Rebuilds the graphs of one file, given its tables."""

    def __init__(
        self,
        hints: Mapping[str, int | None],
        stacks: Sequence[Sequence[str]],
        classes: Any = None,
        meshes: Sequence[CapturedMesh] = (),
    ) -> None:
        self._targets = TargetDecoder()
        self.values = ValueDecoder(hints, self._targets, meshes)
        self._stacks = decode_module_stacks(stacks, classes)

    def graph(self, encoded: Mapping[str, Any]) -> fx.GraphModule:
        root = torch.nn.Module()
        for name, attribute in encoded["attributes"].items():
            _check_identifier(name)
            if "graph" in attribute:
                root.add_module(name, self.graph(attribute["graph"]))
            else:
                root.register_buffer(name, self.values.value(attribute["tensor"]))
        graph = fx.Graph()
        nodes: dict[str, fx.Node] = {}
        with self.values.graph_scope():
            for item in encoded["nodes"]:
                node = self._node(item, graph, nodes)
                nodes[node.name] = node
        module = fx.GraphModule(root, graph)
        graph.lint()
        return module

    def _node(
        self, encoded: Mapping[str, Any], graph: fx.Graph, nodes: Mapping[str, fx.Node]
    ) -> fx.Node:
        name, op, target = encoded["name"], encoded["op"], encoded["target"]
        _check_identifier(name)
        if op == "call_function":
            target = self._targets.decode(target)
        elif op in ("placeholder", "get_attr", "output"):
            _check_identifier(target)
        else:
            raise CaptureFormatError(f"refused node of kind {str(op)[:200]!r}")
        argument = self.values.argument
        arguments = tuple(argument(item, nodes) for item in encoded.get("args", ()))
        keywords = {
            _check_identifier(key): argument(item, nodes)
            for key, item in encoded.get("kwargs", {}).items()
        }
        node = graph.create_node(op, target, arguments, keywords, name=name)
        if node.name != name:
            raise CaptureFormatError(f"node name {name[:200]!r} is taken or not allowed")
        if "val" in encoded:
            node.meta["val"] = self.values.value(encoded["val"])
        node.meta.update(self._meta(encoded.get("meta", {})))
        return node

    def _meta(self, encoded: Mapping[str, Any]) -> dict[str, Any]:
        meta = {key: encoded[key] for key in (*_PLAIN_META, "custom") if key in encoded}
        if "recompute" in encoded:
            meta["recompute"] = CheckpointPolicy[encoded["recompute"]]
        for key in _STACKS:
            if key in encoded:
                meta[key] = dict(self._stacks[encoded[key]])
        if "desc" in encoded:
            meta["desc"] = self.values.descriptor(encoded["desc"])
        if "marks" in encoded:
            meta.update(decode_marks(encoded["marks"]))
        return meta


def _check_identifier(name: Any) -> str:
    if not is_identifier(name):
        raise CaptureFormatError(f"not an identifier: {str(name)[:200]!r}")
    assert isinstance(name, str)
    return name
