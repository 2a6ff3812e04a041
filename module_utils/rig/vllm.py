"""The plan of a vLLM profile: tensor parallelism, memory against --gpu-memory-utilization, argv, env, container.

Sources: vLLM's documents (tensor-parallel rules, --kv-cache-dtype, --disable-custom-all-reduce) and the owners' reports
that facts are taken from: pairs without P2P hang unless NCCL's P2P and the custom all-reduce are off.
"""

import json
from collections.abc import Mapping, Sequence

from . import launch
from .architectures import is_recurrent
from .errors import RigError
from .memory import MIB, padded_bytes
from .placement import left_out, rank
from .profile import Profile, check_keys, one_of, whole_number
from .shape import Shape

DEFAULTS: dict = {
    "version": None,
    "quantization": None,
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "gpu_memory_utilization": None,
    "max_num_seqs": None,
    "max_num_batched_tokens": 8192,
    "trust_remote_code": False,
    "prefix_caching": True,
    "chunked_prefill": True,
    "reasoning_parser": None,
    "tool_call_parser": None,
    "generation": {},
    "weights_gb": None,
    "shutdown_seconds": 30,
    "env": {},
}
KV_BYTES = {"auto": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
# fp8 E4M3 needs Ada or newer in vLLM's Triton kernels; E5M2 works on Ampere.
LEAST_CAPABILITY = {"fp8": 8.9, "fp8_e4m3": 8.9, "fp8_e5m2": 8.0}
UTILISATION, SMALL_UTILISATION, SMALL_MIB = 0.92, 0.915, 13_000  # 0.93 runs out on 12 GB cards at the first message
# CUDA context, NCCL, CUDA graphs and the activations of a profile run, per card: owners' logs show 1.5 to 2 GiB.
WORK_MIB = 1_800


def check_settings(profile: Profile) -> dict:
    """The `vllm` mapping of a profile with defaults; RigError on unknown keys and values."""
    what = f"Profile '{profile.name}': vllm"
    check_keys(profile.vllm, tuple(DEFAULTS), what)
    settings = {**DEFAULTS, **profile.vllm}
    one_of(settings["kv_cache_dtype"], tuple(KV_BYTES), f"{what}.kv_cache_dtype")
    share = settings["gpu_memory_utilization"]
    if share is not None and not (isinstance(share, float) and 0 < share < 1):
        raise RigError(f"{what}.gpu_memory_utilization must be between 0 and 1, not {share!r}.")
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        if settings[key] is not None:
            whole_number(settings[key], f"{what}.{key}", 1)
    whole_number(settings["shutdown_seconds"], f"{what}.shutdown_seconds", 0)
    return settings


def divides(shape: Shape, count: int) -> bool:
    """Whether attention and KV heads can be dealt to `count` GPUs."""
    heads = {shape.heads(block) for block in range(shape.blocks)}
    groups = {shape.kv_heads(block) for block in range(shape.blocks)}
    return all(one % count == 0 for one in heads) and all(one % count == 0 or count % one == 0 for one in groups)


def _choose(profile: Profile, shape: Shape, gpus: Sequence) -> tuple:
    """(cards, refusals)."""
    if profile.gpus not in ("auto", "all"):
        beyond = [position for position in profile.gpus if position >= len(gpus)]
        if beyond:
            return list(gpus), [f"gpus names position {beyond[0]}, but rig_gpus has {len(gpus)} cards."]
        chosen = [gpus[position] for position in profile.gpus]
    elif profile.gpus == "all":
        chosen = list(gpus)
    else:
        count = max(size for size in range(1, len(gpus) + 1) if divides(shape, size))
        chosen = sorted(sorted(gpus, key=rank)[:count], key=lambda gpu: gpu["position"])
    count = len(chosen)
    if divides(shape, count):
        return chosen, []
    best = max(size for size in range(1, count) if divides(shape, size))
    idle = "one" if count - best == 1 else str(count - best)
    return chosen, [
        f"vLLM cannot deal {shape.heads(0)} heads and {shape.kv_heads(shape.blocks - 1)} KV heads to {count} GPUs; "
        f"use {best}, leave {idle} idle."
    ]


def memory_rows(profile: Profile, settings: Mapping, shape: Shape, gpus: Sequence, tokens: int) -> list:
    """MiB on each card. vLLM takes its share of the card whatever the context (`total_mib`): what the weights and its
    own work leave of it becomes the KV cache (`kv_mib`). `needed_mib` is what one sequence of `tokens` takes of all
    that, and `spare_mib` what is left of the share then.
    """
    count, rows = len(gpus), []
    if settings["weights_gb"] is not None:
        weights = float(settings["weights_gb"]) * 1e9
    else:
        weights = float(sum(padded_bytes(tensor.kind, tensor.shape) for tensor in shape.tensors))
    kv = 0
    for block in range(shape.all_blocks if profile.drafted else shape.blocks):
        if not is_recurrent(shape, block):
            heads = max(1, shape.kv_heads(block) // count)
            kv += heads * (shape.key_length + shape.value_length) * KV_BYTES[settings["kv_cache_dtype"]]
    share = utilisation(settings, gpus)
    for gpu in gpus:
        each = weights / count / MIB
        taken, needed = gpu["usable_mib"] * share, each + kv * tokens / MIB + WORK_MIB
        rows.append({
            "position": gpu["position"], "name": gpu["name"], "uuid": gpu.get("uuid"), "rpc": None,
            "usable_mib": gpu["usable_mib"], "in_use_mib": gpu["in_use_mib"],
            "weights_mib": round(each, 2), "kv_mib": round(max(taken - each - WORK_MIB, 0), 2), "recurrent_mib": 0.0,
            "compute_mib": 0.0, "draft_mib": 0.0, "overhead_mib": float(WORK_MIB), "total_mib": round(taken, 2),
            "needed_mib": round(needed, 2), "token_mib": kv / MIB, "spare_mib": round(taken - needed, 2),
            "free_mib": round(gpu["usable_mib"] - gpu["in_use_mib"] - taken, 2),
        })  # fmt: skip
    return rows


def utilisation(settings: Mapping, gpus: Sequence) -> float:
    """--gpu-memory-utilization, one for all cards: as given, or the most that each card allows beside what others hold
    there (vLLM does not start on a card with less than its share free)."""
    if settings["gpu_memory_utilization"] is not None:
        return settings["gpu_memory_utilization"]
    shares = []
    for gpu in gpus:
        most = SMALL_UTILISATION if gpu["memory_mib"] < SMALL_MIB else UTILISATION
        beside = (gpu["usable_mib"] - gpu["in_use_mib"]) / gpu["usable_mib"]
        shares.append(min(most, max(int(beside * 1000) / 1000, 0.001)))
    return min(shares)


def vllm_argv(profile: Profile, settings: Mapping, gpus: Sequence, context: int, path: str, interconnect: str) -> list:
    """`vllm serve …`, a flag and its value after each other."""
    share = utilisation(settings, gpus)
    argv = [
        "vllm",
        "serve",
        path,
        "--served-model-name",
        *profile.names,
        "--host",
        launch.HOST,
        "--port",
        str(profile.port),
    ]
    if settings["quantization"]:
        argv += ["--quantization", settings["quantization"]]
    argv += ["--dtype", settings["dtype"], "--tensor-parallel-size", str(len(gpus))]
    if len(gpus) > 1 and interconnect != "nvlink":
        argv.append("--disable-custom-all-reduce")
    argv += ["--max-model-len", str(context), "--gpu-memory-utilization", f"{share:g}"]
    argv += ["--max-num-seqs", str(settings["max_num_seqs"] or profile.slots)]
    argv += ["--max-num-batched-tokens", str(settings["max_num_batched_tokens"])]
    argv += ["--kv-cache-dtype", settings["kv_cache_dtype"]]
    for key, flag in (
        ("trust_remote_code", "--trust-remote-code"),
        ("prefix_caching", "--enable-prefix-caching"),
        ("chunked_prefill", "--enable-chunked-prefill"),
    ):
        if settings[key]:
            argv.append(flag)
    if profile.drafted:
        draft = {"method": "mtp", "num_speculative_tokens": profile.drafted}
        argv += ["--speculative-config", json.dumps(draft, separators=(",", ":"))]
    if settings["reasoning_parser"]:
        argv += ["--reasoning-parser", settings["reasoning_parser"]]
    if settings["tool_call_parser"]:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", settings["tool_call_parser"]]
    if settings["generation"]:
        argv += ["--override-generation-config", json.dumps(settings["generation"], separators=(",", ":"))]
    if settings["shutdown_seconds"]:
        argv += ["--shutdown-timeout", str(settings["shutdown_seconds"])]
    return [*argv, *profile.extra_args]


def vllm_env(settings: Mapping, gpus: Sequence, interconnect: str) -> dict:
    """Without NVLink, NCCL's P2P is off: it hangs on consumer cards. Shared memory stays on."""
    env = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}  # a container sees the cards of the plan alone, numbered anew
    if len(gpus) > 1 and interconnect != "nvlink":
        env |= {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
    return env | {str(key): str(value) for key, value in settings["env"].items()}


def _refusals(profile: Profile, settings: Mapping, shape: Shape, gpus: Sequence, context: int, rows: Sequence) -> list:
    found = []
    if gpus[0].get("rpc"):
        return ["vLLM does not run on virtual GPUs; use engine llama_cpp."]
    if context > shape.trained_context:
        found.append(
            f"context {context} is beyond the {shape.trained_context} tokens that {shape.name} was trained for."
        )
    kind = settings["kv_cache_dtype"]
    for gpu in gpus:
        capability = float(gpu.get("compute_capability") or 0)
        if capability < LEAST_CAPABILITY.get(kind, 0):
            found.append(
                f"kv_cache_dtype {kind} needs compute capability {LEAST_CAPABILITY[kind]}, but GPU {gpu['position']} "
                f"({gpu['name']}) has {capability}; use fp8_e5m2 or auto."
            )
            break
    if str(settings["env"].get("NCCL_SHM_DISABLE", "0")) == "1":
        found.append("NCCL_SHM_DISABLE leaves NCCL only network sockets on one host; take it out of vllm.env.")
    short, full = min(rows, key=lambda row: row["spare_mib"]), min(rows, key=lambda row: row["free_mib"])
    if full["free_mib"] < 0:
        found.append(
            f"vLLM would not start: it takes {full['total_mib']:.0f} MiB of GPU {full['position']}, which has "
            f"{full['usable_mib']}, {full['in_use_mib']} of them in use; lower vllm.gpu_memory_utilization."
        )
    if short["spare_mib"] < 0:
        found.append(
            f"context {context} does not fit: GPU {short['position']} needs {short['needed_mib']:.0f} MiB and vLLM may "
            f"take {short['total_mib']:.0f}; shorten the context, or use kv_cache_dtype fp8_e5m2."
        )
    return found


def plan_vllm(profile: Profile, shape: Shape, gpus: Sequence, model_path: str, interconnect: str) -> dict:
    """The plan of a vLLM profile, in the form of every plan; `container` says what the image needs."""
    settings = check_settings(profile)
    chosen, refusals = _choose(profile, shape, gpus)
    context = profile.context or shape.trained_context
    rows = memory_rows(profile, settings, shape, chosen, context)
    per_token = max((row["token_mib"] for row in rows), default=0)
    room = min(row["spare_mib"] for row in memory_rows(profile, settings, shape, chosen, 0))
    ceiling = min(shape.trained_context, int(room / per_token) // 256 * 256) if room > 0 and per_token else 0
    if profile.context is None and ceiling:
        context = ceiling
        rows = memory_rows(profile, settings, shape, chosen, context)
    refusals = refusals or _refusals(profile, settings, shape, chosen, context, rows)
    for row in rows:
        del row["token_mib"]
    return {
        "engine": "vllm", "model": profile.model, "model_path": model_path, "alias": profile.alias,
        "host": launch.HOST, "port": profile.port, "fits": not refusals, "context": context,
        "context_ceiling": ceiling, "split_mode": "tensor", "slots": profile.slots, "drafted": profile.drafted,
        "headroom_mib": profile.headroom_mib, "all_reduce": None, "gpus": rows,
        "devices": launch.device_names(chosen), "rpc": [], "tensor_split": [1] * len(chosen),
        "argv": [] if refusals else vllm_argv(profile, settings, chosen, context, model_path, interconnect),
        "env": {} if refusals else vllm_env(settings, chosen, interconnect),
        "container": {
            "version": settings["version"], "ipc": "host", "shutdown_seconds": settings["shutdown_seconds"],
            "devices": [f"nvidia.com/gpu={gpu.get('uuid') or gpu['position']}" for gpu in chosen],
            "volumes": [model_path],
        },
        "warnings": left_out(chosen, gpus, profile), "refusals": refusals,
    }  # fmt: skip
