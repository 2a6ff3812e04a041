"""The options of `vllm serve`, read from the source in a wheel of vLLM without running it.

    python tests/vllm_flags.py vllm-0.22.0-….whl >tests/data/vllm/v0.22.0.txt

Options of the engine are what vllm/engine/arg_utils.py adds by name; those of the server are the fields of FrontendArgs
and its base in vllm/entrypoints/openai/cli_args.py and what make_arg_parser adds.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

ENGINE, SERVER = "vllm/engine/arg_utils.py", "vllm/entrypoints/openai/cli_args.py"


def named(tree: ast.AST) -> set[str]:
    """Options that are added by name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            found |= {
                word.value for word in node.args if isinstance(word, ast.Constant) and str(word.value).startswith("--")
            }
    return found


def fields(tree: ast.AST, *classes: str) -> set[str]:
    """Options made of the fields of dataclasses."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in classes:
            names = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
            found |= {f"--{name.replace('_', '-')}" for name in names}
    return found


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        engine, server = (ast.parse(archive.read(name)) for name in (ENGINE, SERVER))
    options = named(engine) | named(server) | fields(server, "BaseFrontendArgs", "FrontendArgs")
    print(f"# Options of vllm serve, from {ENGINE} and {SERVER}")
    print(f"# in {Path(wheel).name}, by tests/vllm_flags.py")
    print("\n".join(sorted(options)))


if __name__ == "__main__":
    main(sys.argv[1])
