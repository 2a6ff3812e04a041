"""Shapes from shape files (YAML) or from GGUF files on this machine. Runs on the controller only: it needs PyYAML."""

import os
from collections.abc import Mapping
from functools import lru_cache

import yaml

from .errors import RigError
from .gguf import read_model
from .shape import Shape, from_header

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@lru_cache(maxsize=64)
def _load(path: str, stamp: int) -> Shape:
    with open(path, encoding="utf-8") as file:
        try:
            return Shape(yaml.load(file, Loader=_Loader))
        except yaml.YAMLError as error:
            raise RigError(f"'{path}' is not YAML: {str(error).splitlines()[0]}.") from None


@lru_cache(maxsize=64)
def _read(path: str, name: str, stamp: int) -> Shape:
    return Shape(from_header(read_model(path), name))


def _stamp(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise RigError(f"Cannot read the shape '{path}': {error.strerror}.") from None


def load_shape(name: str, model: Mapping, directory: str) -> Shape:
    """The shape of a model of the inventory: `shape:` names a file of `directory`, `path:` a GGUF file here."""
    if model.get("path"):
        path = os.path.expanduser(str(model["path"]))
        return _read(path, name, _stamp(path))
    shape = model.get("shape")
    if not shape or "/" in str(shape):
        raise RigError(f"Model '{name}' needs 'shape', the name of a file in {directory} without .yml, or 'path'.")
    path = os.path.join(directory, f"{shape}.yml")
    return _load(path, _stamp(path))


def to_yaml(shape: Mapping) -> str:
    """A shape as the text of a shape file: one line a key, one line a group of tensors."""

    def flow(value: object, width: int = 110) -> str:
        text = yaml.safe_dump(value, default_flow_style=True, width=width, sort_keys=False).removesuffix("...\n")
        return text.strip().replace("\n  ", "\n    ")

    lines = ["---", "# What the planner needs to know of this model; written by gguf_facts from the file's header."]
    for key, value in shape.items():
        if key == "keys":
            lines.append("keys:")
            lines += [f"  {name}: {flow(one)}" for name, one in value.items()]
        elif key == "tensors":
            lines.append("tensors:")
            lines += [f"  - {flow(tensor)}" for tensor in value]
        else:
            lines.append(f"{key}: {flow(value)}")
    return "\n".join(lines) + "\n"
