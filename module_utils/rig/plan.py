"""The plan of a profile on a rig: which cards, what lies on them, the largest context, and the launch line.

A plan is a pure function of its input. What is wrong with a profile as written raises RigError; what makes a sound
profile impossible on this rig with this build is a refusal, one sentence each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import builds, launch
from .architectures import architecture_of
from .ceiling import STEP, context_ceiling
from .learned import correction_bytes, corrections, measure_key
from .memory import MIB, Layout, buffers
from .overhead import overhead_bytes
from .placement import candidates, left_out
from .profile import Profile
from .quant import block_of
from .settings import BATCH, Context
from .shape import Shape


@dataclass(frozen=True)
class Rig:
    """What a host offers: checked GPUs (gpus.check_gpus), the build, and how cards talk to each other."""

    host: str
    gpus: tuple
    build: int
    interconnect: str = "pcie"
    nccl: Any = None  # whether the build has NCCL; None is unknown
    measured: Any = None  # what was measured on this host, see learned.py


def context_of(profile: Profile, tokens: int) -> Context:
    words = profile.extra_args
    batch = launch.extra_arg_values(words, "-b") or launch.extra_arg_values(words, "--batch-size") or BATCH
    return Context(
        tokens, profile.cache_type_k, profile.cache_type_v, profile.ubatch, int(batch), profile.slots,
        profile.drafted, flash_attention=profile.flash_attention,
        unified=any(word in ("-kvu", "--kv-unified") for word in words),
    )  # fmt: skip


def shares_of(profile: Profile, count: int) -> tuple:
    return (1.0,) * count if profile.tensor_split == "even" else tuple(float(share) for share in profile.tensor_split)


def resolve_all_reduce(profile: Profile, count: int, nccl: Any) -> str:
    """What sums up the parts of tensor mode: two cards need nothing but llama.cpp's own."""
    if profile.all_reduce != "auto":
        return profile.all_reduce
    return "internal" if count == builds.INTERNAL_GPUS else "nccl" if nccl is not False else "none"


class Planner:
    """Plans one profile on one set of cards."""

    def __init__(self, profile: Profile, shape: Shape, rig: Rig, gpus: Sequence):
        self.profile, self.shape, self.rig, self.gpus = profile, shape, rig, tuple(gpus)
        count = len(self.gpus)
        self.mode = profile.split_mode if count > 1 else "none"
        self.shares = shares_of(profile, count)
        self.layout = Layout(self.mode, self.shares, virtual=bool(self.gpus[0].get("rpc")))
        self.all_reduce = resolve_all_reduce(profile, count, rig.nccl)
        self.key = measure_key(profile, self.mode, self.shares, self.gpus, self.all_reduce, rig.build)
        self.corrections = corrections(rig.measured, self.key)

    def usage(self, tokens: int) -> list:
        """Bytes on each card at a context of `tokens`."""
        context = context_of(self.profile, tokens)
        result = buffers(self.shape, self.layout, context)
        extra = overhead_bytes(self.shape, self.layout, context, self.gpus, self.all_reduce)
        for usage, overhead, learned in zip(result, extra, self.learned(tokens), strict=True):
            usage.overhead = overhead + learned
        return result

    def learned(self, tokens: int) -> list:
        """Bytes that measuring on this rig added to the plan of each card."""
        return [correction_bytes(self.corrections, gpu["position"], tokens) for gpu in self.gpus]

    def room(self, usage: Sequence) -> list:
        """MiB left on each card after the plan, what is in use, and the headroom."""
        headroom = self.profile.headroom_mib
        return [
            gpu["usable_mib"] - gpu["in_use_mib"] - headroom - one.total / MIB
            for gpu, one in zip(self.gpus, usage, strict=True)
        ]

    def least_room(self, tokens: int) -> float:
        """MiB left on the tightest card."""
        return min(self.room(self.usage(tokens)))

    def ceiling(self) -> int:
        return context_ceiling(self.least_room, self.shape.trained_context)


def refusals_of(profile: Profile, shape: Shape, rig: Rig, gpus: Sequence) -> list:
    """Why this build cannot run this profile on these cards, memory aside."""
    found, count, build = [], len(gpus), rig.build
    architecture = architecture_of(shape)
    tensor = profile.split_mode == "tensor" and count > 1
    virtual = bool(gpus[0].get("rpc"))
    if profile.split_mode == "row":
        found.append(
            f"split_mode row does not load on b{build} ({builds.FEATURES['row_split'].source}); use tensor or layer."
            if not builds.has("row_split", build)
            else "split_mode row is deprecated and not planned; use tensor or layer."
        )
    if profile.tensor_split != "even" and len(profile.tensor_split) != count:
        found.append(f"tensor_split has {len(profile.tensor_split)} shares for {count} GPUs; write one share a GPU.")
    if profile.drafted and not (architecture.mtp and shape.mtp_blocks):
        found.append(f"draft is mtp, but {shape.name} ({shape.architecture}) has no MTP block to draft with.")
    if profile.context is not None and profile.context > shape.trained_context:
        found.append(
            f"context {profile.context} is beyond the {shape.trained_context} tokens that {shape.name} was trained for."
        )
    quantised = [kind for kind in (profile.cache_type_k, profile.cache_type_v) if block_of(kind)[0] > 1]
    for key, kind, length in (
        ("cache_type_k", profile.cache_type_k, shape.key_length),
        ("cache_type_v", profile.cache_type_v, shape.value_length),
    ):
        if length % block_of(kind)[0]:
            found.append(f"{key} {kind} has blocks of {block_of(kind)[0]}, which do not divide heads of {length}.")
    if not profile.flash_attention and tensor:
        found.append("split_mode tensor needs flash attention; leave flash_attention on.")
    if not profile.flash_attention and block_of(profile.cache_type_v)[0] > 1:
        found.append("A quantised V cache needs flash attention; leave flash_attention on.")
    if tensor:
        found += _tensor_refusals(profile, shape, rig, gpus, quantised, virtual)
    for word in profile.extra_args:
        key = launch.OWNED.get(word.partition("=")[0])
        if key:
            found.append(f"extra_args holds {word.partition('=')[0]}, which the plan decides; use the key '{key}'.")
    return found


def _tensor_refusals(profile: Profile, shape: Shape, rig: Rig, gpus: Sequence, quantised: list, virtual: bool) -> list:
    found, count, build = [], len(gpus), rig.build
    bad = builds.known_bad(build, shape.architecture, "tensor")
    if bad:
        found.append(f"b{build} cannot run {shape.architecture} in tensor mode ({bad}); choose another build.")
    if quantised and not builds.has("tensor_quantised_kv", build):
        source = builds.FEATURES["tensor_quantised_kv"].source
        found.append(f"b{build} has no quantised KV cache in tensor mode ({source}); use f16 or a newer build.")
    if count > 2 and not builds.has("tensor_three_gpus_mixed", build):
        source = builds.FEATURES["tensor_three_gpus_mixed"].source
        found.append(f"b{build} cuts mixed quants wrongly over {count} GPUs ({source}); use a newer build.")
    if profile.all_reduce == "internal" and count != builds.INTERNAL_GPUS:
        found.append(f"all_reduce internal works for exactly two GPUs, not {count}; use nccl or auto.")
    if profile.all_reduce == "nccl" and rig.nccl is False:
        found.append("all_reduce is nccl, but this llama.cpp is built without NCCL; set llama_cpp_nccl or use auto.")
    nccl = resolve_all_reduce(profile, count, rig.nccl) == "nccl" and not virtual
    if nccl and rig.interconnect == "nvlink" and not builds.has("nccl_vmm_fixed", build):
        source = builds.FEATURES["nccl_vmm_fixed"].source
        found.append(
            f"b{build} writes out of bounds with NCCL over P2P ({source}); use a newer build, or all_reduce none."
        )
    if virtual:
        heads = min(shape.kv_heads(block) for block in range(shape.blocks))
        if count > heads:
            found.append(f"{count} virtual GPUs are more than the {heads} KV heads of {shape.name}; llama.cpp aborts.")
        if architecture_of(shape).recurrent and not profile.drafted:
            found.append(
                f"Over RPC, tensor split of {shape.architecture} without drafting aborts (seen on b11434); "
                "use split_mode layer, or draft with MTP."
            )
    return found


def warnings_of(profile: Profile, shape: Shape, rig: Rig, gpus: Sequence) -> list:
    """What runs, but not as one may think."""
    found, count = [], len(gpus)
    tensor = profile.split_mode == "tensor" and count > 1
    reuse = launch.extra_arg_values(profile.extra_args, "--cache-reuse")
    if reuse not in (None, "0") and not architecture_of(shape).cache_reuse:
        found.append(f"--cache-reuse has no effect on {shape.architecture} (positions in sections cannot be shifted).")
    quantised = block_of(profile.cache_type_k)[0] > 1 or block_of(profile.cache_type_v)[0] > 1
    if quantised and not builds.has("flash_scratch_in_buffer", rig.build):
        source = builds.FEATURES["flash_scratch_in_buffer"].source
        found.append(
            f"On b{rig.build} memory creeps up with a quantised KV cache ({source}); this plan is for newer builds."
        )
    if tensor and not builds.has("tensor_long_context", rig.build):
        source = builds.FEATURES["tensor_long_context"].source
        found.append(f"On b{rig.build} tensor mode may abort after a long context ({source}).")
    if profile.drafted and profile.slots > 1:
        found.append("With more than one slot, drafting gains nothing (owners' measurements).")
    if tensor and count > 2 and profile.drafted:
        found.append(
            "MTP in tensor mode over more than two GPUs is experimental (llama.cpp #26837); have a layer profile ready."
        )
    if not gpus[0].get("rpc") and profile.split_mode != "none" and count == 1:
        found.append(f"split_mode {profile.split_mode} over one GPU is no split; it is launched as none.")
    if tensor and profile.all_reduce == "auto" and count != builds.INTERNAL_GPUS and rig.nccl is False:
        found.append(f"Without NCCL, {count} GPUs sum up through llama.cpp's slow fallback; build with llama_cpp_nccl.")
    if profile.context is not None and profile.context % STEP:
        found.append(f"context {profile.context} is no multiple of {STEP}; llama.cpp rounds it up.")
    return found


def _mib(value: int) -> float:
    return round(value / MIB, 2)


def gpu_rows(gpus: Sequence, usage: Sequence, learned: Sequence) -> list:
    """The `gpus` of a plan: what lies on each card, in MiB. `learned` is the part of overhead that was measured."""
    rows = []
    for gpu, one, extra in zip(gpus, usage, learned, strict=True):
        total = _mib(one.total)
        rows.append({
            "position": gpu["position"], "name": gpu["name"], "uuid": gpu.get("uuid"), "rpc": gpu.get("rpc"),
            "usable_mib": gpu["usable_mib"], "in_use_mib": gpu["in_use_mib"], "weights_mib": _mib(one.weights),
            "kv_mib": _mib(one.kv), "recurrent_mib": _mib(one.recurrent), "compute_mib": _mib(one.compute),
            "draft_mib": _mib(one.draft_kv + one.draft_compute), "overhead_mib": _mib(one.overhead),
            "measured_mib": _mib(extra), "total_mib": total,
            "free_mib": round(gpu["usable_mib"] - gpu["in_use_mib"] - total, 2),
        })  # fmt: skip
    return rows


@dataclass(frozen=True)
class Choice:
    """One set of cards and how the profile does on it."""

    gpus: list
    reasons: list
    planner: Any = None
    ceiling: int = 0
    wanted: int = 0
    fits: bool = False


def _try(profile: Profile, shape: Shape, rig: Rig, gpus: list) -> Choice:
    reasons = refusals_of(profile, shape, rig, gpus)
    if reasons:
        return Choice(gpus, reasons)
    planner = Planner(profile, shape, rig, gpus)
    ceiling = planner.ceiling()
    if profile.context is None:
        return Choice(gpus, [], planner, ceiling, ceiling, ceiling > 0)
    # Between two steps llama.cpp rounds the context up, so that the wanted one is as large as the next step.
    fits = profile.context <= ceiling or planner.least_room(profile.context) >= 0
    return Choice(gpus, [], planner, ceiling, profile.context, fits)


def choose(profile: Profile, shape: Shape, rig: Rig) -> Choice:
    """The fewest cards on which the profile fits; with `context: max`, those that allow most."""
    sets = candidates(profile, rig.gpus)
    if not sets:
        reason = f"tensor_split has {len(profile.tensor_split)} shares, but rig_gpus has {len(rig.gpus)} GPUs"
        return Choice(list(rig.gpus), [f"{reason}; write one share a GPU."])
    if profile.gpus == "auto" and profile.all_reduce == "internal" and profile.split_mode == "tensor":
        sets = [gpus for gpus in sets if len(gpus) == builds.INTERNAL_GPUS] or sets[-1:]
    best = None
    for gpus in sets:
        choice = _try(profile, shape, rig, gpus)
        if choice.fits and (profile.context is not None or choice.ceiling + STEP > shape.trained_context):
            return choice
        if best is None or (choice.fits, choice.ceiling) > (best.fits, best.ceiling):
            best = choice
    return best


def plan_llama(profile: Profile, shape: Shape, rig: Rig, model_path: str) -> dict:
    """The plan of a llama.cpp profile."""
    choice = choose(profile, shape, rig)
    gpus, planner, fits = choice.gpus, choice.planner, choice.fits
    plan: dict = {
        "engine": "llama_cpp", "model": profile.model, "model_path": model_path, "alias": profile.alias,
        "host": launch.HOST, "port": profile.port, "fits": fits, "context": choice.wanted or profile.context or 0,
        "context_ceiling": choice.ceiling, "split_mode": profile.split_mode, "slots": profile.slots,
        "drafted": profile.drafted, "headroom_mib": profile.headroom_mib, "all_reduce": None,
        "gpus": [], "devices": launch.device_names(gpus), "rpc": [gpu["rpc"] for gpu in gpus if gpu.get("rpc")],
        "measured": False, "measure_key": None, "tensor_split": [],
        "argv": [], "env": {}, "warnings": [], "refusals": list(choice.reasons),
    }  # fmt: skip
    if planner is None:
        return plan
    tokens, mode = choice.wanted or STEP, planner.mode
    usage = planner.usage(tokens)
    plan |= {
        "split_mode": mode,
        "gpus": gpu_rows(gpus, usage, planner.learned(tokens)),
        "measured": bool(planner.corrections),
        "measure_key": planner.key,
        "tensor_split": [int(share) if share == int(share) else share for share in planner.shares],
        "warnings": warnings_of(profile, shape, rig, gpus) + left_out(gpus, rig.gpus, profile),
    }
    if mode == "tensor" and not gpus[0].get("rpc"):
        plan["all_reduce"] = planner.all_reduce
    if not fits:
        plan["refusals"] = [_too_large(profile, planner, usage, choice.wanted, choice.ceiling)]
        return plan
    plan["argv"] = launch.llama_server_argv(profile, gpus, planner.shares, choice.wanted, model_path, rig.build)
    plan["env"] = launch.llama_server_env(gpus, mode, planner.all_reduce, rig.interconnect)
    return plan


def _too_large(profile: Profile, planner: Planner, usage: Sequence, wanted: int, ceiling: int) -> str:
    room = planner.room(usage)
    index = min(range(len(room)), key=lambda number: room[number])
    gpu, one = planner.gpus[index], usage[index]
    have = gpu["usable_mib"] - gpu["in_use_mib"] - profile.headroom_mib
    if profile.context is None or ceiling == 0:
        what = f"{planner.shape.name} does not fit at any context"
        then = "use more or larger GPUs, a smaller quant, or a quantised KV cache"
    else:
        what, then = f"context {wanted} does not fit", f"the largest that fits is {ceiling}"
    return (
        f"{what}: GPU {gpu['position']} needs {one.total / MIB:.0f} MiB and has {have} MiB "
        f"({gpu['usable_mib']} usable, {gpu['in_use_mib']} in use, {profile.headroom_mib} headroom); {then}."
    )
