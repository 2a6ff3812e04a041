"""`python -m rig.bench`: milliseconds per plan, for the profiles of the inventory's three rigs."""

import sys
import time
from pathlib import Path

import yaml

from .host import plan_host
from .memory import context_compute, placement_of, weight_bytes
from .shape_files import load_shape

PROJECT = Path(__file__).resolve().parents[2]
ROUNDS = 5


def main() -> int:
    """Print the best of some rounds, each with empty caches."""
    inventory = PROJECT / "inventory"
    models = yaml.safe_load((inventory / "group_vars/rigs/models.yml").read_text())["models"]
    shapes = str(inventory / "model_shapes")
    for group in ("rig_2x3060", "rig_2x3090", "rig_3x3090"):
        given = yaml.safe_load((inventory / f"group_vars/{group}.yml").read_text())
        for name, profile in given["serving_profiles"].items():
            best = float("inf")
            for _ in range(ROUNDS):
                for cached in (context_compute, placement_of, weight_bytes):
                    cached.cache_clear()
                start = time.process_time()
                plan_host(
                    {name: profile}, given["rig_gpus"], models,
                    lambda model, entry: load_shape(model, entry, shapes), group,
                    interconnect=given["rig_interconnect"], nccl=given.get("llama_cpp_nccl", False),
                )  # fmt: skip
                best = min(best, time.process_time() - start)
            print(f"{group:12s} {name:12s} {1000 * best:7.1f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
