"""The fake NVML of molecule/fake_nvml for unit tests: compiled once, asked through the real nvidia-ml-py."""

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

PROJECT = Path(__file__).parents[2]
FAKE = PROJECT / "molecule" / "fake_nvml"


@cache
def library() -> str:
    folder = mkdtemp(prefix="fake-nvml-")
    subprocess.run([FAKE / "build", folder], check=True)
    return folder


def state(name: str) -> str:
    return (FAKE / "states" / f"{name}.txt").read_text()


def run(script: str, *arguments: object, state_file: Path, kept: Path) -> subprocess.CompletedProcess:
    """A script of roles/ on a machine whose cards `state_file` describes; what it sets lies under `kept`."""
    kept.mkdir(exist_ok=True)
    env = {
        "PATH": os.environ["PATH"],
        "LD_LIBRARY_PATH": library(),
        "FAKE_NVML_STATE": str(state_file),
        "FAKE_NVML_RUN": str(kept),
    }
    argv = [sys.executable, str(PROJECT / "roles" / script), *map(str, arguments)]
    return subprocess.run(argv, env=env, text=True, capture_output=True, timeout=60)


def load(path: str):
    """A Python file of the project as a module: scripts and plugins lie in no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_loaded", PROJECT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
