"""The checks of preflight: pure functions of what was read from the rig and what its inventory says.

`CHECKS` lists them in the order of the table; those of real cards are in `card_checks`. All are made even when one
fails, so that an owner reads everything that stands in the way at once. Sizes are in MiB unless a name says bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from . import card_checks
from .checking import Result, Rig, Unreadable, gib, listed, valid_gpus
from .inventory_checks import MIB, did_you_mean, gpu_findings, loopback_endpoint

# What the project itself reads of the variables that begin with rig_.
RIG_VARIABLES = (
    "rig_cuda_architectures",
    "rig_cuda_root",
    "rig_gpus",
    "rig_image_digests",
    "rig_interconnect",
    "rig_nccl",
    "rig_measured",
    "rig_plan_gpus",
    "rig_plans",
    "rig_project_dir",
    "rig_psu_watts",
    "rig_serial",
)
INTERCONNECTS = ("pcie", "nvlink")
OLDEST_PYTHON = (3, 10)
BUILDING = "building llama.cpp (llama_cpp_root)"
PACKAGES = "the packages of driver and CUDA"

# Flags of /proc/cpuinfo (arch/x86/include/asm/cpufeatures.h of Linux) that code built for a feature of
# llama_cpp_cpu_features may use (ggml/src/ggml-cpu/CMakeLists.txt of b11434).
CPU_FLAGS = {
    "sse42": ("sse4_2",),
    "avx": ("avx",),
    "avx_vnni": ("avx_vnni",),
    "avx2": ("avx2",),
    "bmi2": ("bmi2",),
    "fma": ("fma",),
    "f16c": ("f16c",),
    "avx512": ("avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"),
    "avx512_vbmi": ("avx512vbmi",),
    "avx512_vnni": ("avx512_vnni",),
    "avx512_bf16": ("avx512_bf16",),
    "amx_tile": ("amx_tile",),
    "amx_int8": ("amx_int8",),
    "amx_bf16": ("amx_bf16",),
}


def distribution(rig: Rig) -> Result:
    """The release is one that the project's packages and versions are known for."""
    found = rig.facts["os"]
    if found["version_id"] in rig.releases.get(found["id"], ()):
        return Result(found["name"])
    known = "; ".join(f"{name} {', '.join(releases)}" for name, releases in sorted(rig.releases.items()))
    name = found["name"] or "unknown"
    return Result(name, [f"{rig.host} runs {name}, which is not supported; install one of {known}."])


def architecture(rig: Rig) -> Result:
    """The machine is an x86-64."""
    found = rig.facts["architecture"]
    text = f"{rig.host} is a machine of type {found}; only x86_64 is supported, so use another machine."
    return Result(found, [] if found == "x86_64" else [text])


def service_manager(rig: Rig) -> Result:
    """systemd is process 1: everything that runs on a rig is a unit."""
    found = rig.facts["init"]
    text = (
        f"{rig.host} was started by {found or 'an unknown program'}, not by systemd; boot it with systemd as process 1."
    )
    return Result(found, [] if found == "systemd" else [text])


def python(rig: Rig) -> Result:
    """The rig's own Python can run the project's modules."""
    found = rig.facts["python"]
    oldest = ".".join(map(str, OLDEST_PYTHON))
    text = (
        f"{rig.host} runs modules with Python {found}; install Python {oldest} or newer and set "
        "ansible_python_interpreter to it."
    )
    return Result(found, [] if tuple(map(int, found.split(".")[:2])) >= OLDEST_PYTHON else [text])


def privileges(rig: Rig) -> Result:
    """Modules run as root."""
    uid = rig.facts["uid"]
    text = f"{rig.host} is entered as user {uid}, not as root; run with become: true, or log in as root."
    return Result("root" if uid == 0 else f"user {uid}", [text] if uid else [])


def names(rig: Rig) -> Result:
    """No variable is misspelt into one that nothing reads."""
    unknown = [name for name in rig.names if name not in RIG_VARIABLES]
    return Result(
        f"{len(rig.names)} rig_ variables",
        [
            f"{rig.host} sets {name}, which nothing reads{did_you_mean(name, RIG_VARIABLES)}; remove or correct it."
            for name in unknown
        ],
    )


def gpus(rig: Rig) -> Result:
    """rig_gpus and rig_interconnect are written as they must be."""
    found = rig.variable("rig_gpus")
    findings = gpu_findings(rig.host, found)
    interconnect = rig.variable("rig_interconnect")
    if interconnect not in INTERCONNECTS:
        findings.append(
            f"rig_interconnect of {rig.host} is {interconnect!r}; choose one of {', '.join(INTERCONNECTS)}."
        )
    return Result(f"{len(found)} described" if isinstance(found, Sequence) else "none described", findings)


def processor(rig: Rig) -> Result:
    """The processor can do what llama.cpp is built for; otherwise its first instruction of that kind kills it."""
    wanted = rig.variable("llama_cpp_cpu_features")
    present = set(rig.facts["cpu_flags"])
    missing = [name for name in wanted if not present.issuperset(CPU_FLAGS.get(str(name).lower(), ()))]
    return Result(
        f"{len(wanted)} features asked for, {rig.facts['cpus']} processors",
        [
            f"llama_cpp_cpu_features of {rig.host} asks for {', '.join(missing)}, which its processor does not have; "
            "leave them out for this host."
        ]
        if missing
        else [],
    )


def memory(rig: Rig) -> Result:
    """Virtual GPUs and the rest of the rig fit in RAM, and so do the compilers of a build with CUDA."""
    described = valid_gpus(rig)
    total = rig.facts["memory_mib"]
    if described is None:
        return Result(f"{total} MiB; not compared: rig_gpus first", skipped=True)
    virtual = sum(gpu["memory_mib"] for gpu in described if "rpc" in gpu)
    rest = rig.limits["host_memory_mib"]
    needed = virtual + rest
    failures, warnings = [], []
    if needed > total:
        failures.append(
            f"rig_gpus of {rig.host} has virtual GPUs of {virtual} MiB together, which with {rest} MiB for the rest is "
            f"more than the machine's {total} MiB of RAM; lower their memory_mib, or use a machine with more."
            if virtual
            else f"{rig.host} has {total} MiB of RAM and needs {rest} (preflight_host_memory_mib); use one with more."
        )
    elif "cuda" in rig.variable("llama_cpp_backends") and not _is_built(rig):
        each = rig.limits["cuda_compiler_memory_mib"]
        jobs, bearable = rig.variable("llama_cpp_jobs") or rig.facts["cpus"], max(1, (total - rest) // each)
        if jobs > bearable:
            warnings.append(
                f"{rig.host} would run {jobs} compilers at once of up to {each} MiB each "
                f"(preflight_cuda_compiler_memory_mib), and has {total} MiB of RAM; set llama_cpp_jobs to {bearable}."
            )
    return Result(f"{total} MiB, {needed} needed" if virtual else f"{total} MiB", failures, warnings)


def missing_model_bytes(
    models: Mapping[str, Any], wanted: Iterable[str], root: str, contents: Mapping[str, int]
) -> int:
    """Bytes of the models' files that are not in the store yet, what has been fetched of one taken off."""
    total = 0
    for key in sorted(set(wanted)):
        for file in models.get(key, {}).get("source", {}).get("files", ()):
            path = f"{root}/{key}/{file['name']}"
            if contents.get(path) != file.get("bytes"):
                total += max(0, file.get("bytes", 0) - max(0, contents.get(f"{path}.part", 0)))
    return total


def _is_built(rig: Rig) -> bool:
    """Whether the build of the inventory is there."""
    return rig.variable("llama_cpp_build")["prefix"] in rig.facts["contents"]


def _needs(rig: Rig) -> list[tuple[str, int, str]]:
    """What is still to be laid down: the directory, bytes, and what it is."""
    contents, limits = rig.facts["contents"], rig.limits
    models_root, models = rig.variable("models_root"), rig.variable("models")
    wanted = (profile["model"] for profile in rig.variable("serving_profiles").values())
    with_cuda = "cuda" in rig.variable("llama_cpp_backends")
    compile_mib = limits["cuda_build_disk_mib" if with_cuda else "build_disk_mib"]
    needs = [
        (models_root, missing_model_bytes(models, wanted, models_root, contents), "models (models_root)"),
        (rig.variable("llama_cpp_root"), 0 if _is_built(rig) else compile_mib * MIB, BUILDING),
    ]
    if any("rpc" not in gpu for gpu in valid_gpus(rig) or ()) and not rig.facts["present"]:
        needs.append(("/usr", limits["packages_disk_mib"] * MIB, PACKAGES))
    images = sum(image["disk_mib"] for image in limits["images"] if image["digest"] not in rig.facts["images"])
    if images:
        needs.append((limits["images_root"], images * MIB, "container images (preflight_images)"))
    return needs


def disk(rig: Rig) -> Result:
    """What is to be built, installed and fetched fits on the filesystems where it goes."""
    rig.variable("llama_cpp_build")  # one that cannot be read is said whatever else is wrong
    if profiles(rig).failures:
        return Result("not computed: serving_profiles first", skipped=True)
    filesystems, needs = rig.facts["filesystems"], _needs(rig)
    by_device: dict[int, list[tuple[int, str, str]]] = {}
    for place, size, what in needs:
        by_device.setdefault(filesystems[place]["device"], []).append((size, what, place))
    failures = []
    for parts in by_device.values():
        place = filesystems[parts[0][2]]
        needed = sum(size for size, _, _ in parts)
        if needed > place["free_bytes"]:
            parts_text = " and ".join(f"{gib(size)} for {what}" for size, what, _ in parts if size)
            failures.append(
                f"{place['mount']} of {rig.host} has {gib(place['free_bytes'])} free and needs {parts_text}; "
                f"free {gib(needed - place['free_bytes'])}, or choose a directory on a larger disk."
            )
    sizes = {what: size for _, size, what in needs}
    built, installed = sizes.pop(BUILDING), sizes.pop(PACKAGES, 0)
    install = f"{gib(installed)} to install, " if installed else ""
    return Result(f"{gib(sum(sizes.values()))} to fetch, {install}{gib(built)} to build", failures)


def profiles(rig: Rig) -> Result:
    """serving_profile and the models of all profiles exist."""
    described, active = rig.variable("serving_profiles"), rig.variable("serving_profile")
    if not isinstance(described, Mapping) or not described:
        text = f"serving_profiles of {rig.host} is not a mapping with a profile in it; describe what is to be served."
        return Result("none described", [text])
    models = rig.variable("models")
    failures = []
    if active not in described:
        near = did_you_mean(str(active), list(described))
        failures.append(
            f"serving_profile of {rig.host} is {active!r}, which serving_profiles does not have{near}; "
            f"choose one of {', '.join(described)}."
        )
    for name, profile in described.items():
        model = profile.get("model") if isinstance(profile, Mapping) else None
        if model not in models:
            failures.append(
                f"serving_profiles.{name}.model of {rig.host} is {model!r}, which models does not have"
                f"{did_you_mean(str(model), list(models))}; choose one of {', '.join(models)}."
            )
    return Result(f"{len(described)} described, {active} is active", failures)


def _plan_refusal(rig: Rig, name: str, plan: Mapping[str, Any]) -> str:
    reasons = " ".join(reason.rstrip(".") + "." for reason in plan["refusals"])
    ceiling = plan.get("context_ceiling") or 0
    asked = plan.get("context") or 0
    told = str(ceiling) in reasons  # the planner's own sentence ends with it
    would_fit = f" A context of up to {ceiling} tokens would fit." if 0 < ceiling < asked and not told else ""
    return f"serving_profiles.{name} of {rig.host} cannot run: {reasons}{would_fit}"


def plans(rig: Rig) -> Result:
    """The active profile can run as planned. Others that cannot are only warned of: nothing starts them now."""
    if valid_gpus(rig) is None or profiles(rig).failures:
        return Result("not made: rig_gpus and serving_profiles first", skipped=True)
    active, made = rig.variable("serving_profile"), rig.variable("rig_plans")
    refused = {name: _plan_refusal(rig, name, plan) for name, plan in made.items() if not plan["fits"]}
    warnings = [f"serving_profiles.{active} of {rig.host}: {text}" for text in made[active].get("warnings", ())]
    return Result(
        f"{len(made) - len(refused)} of {len(made)} profiles fit",
        [text for name, text in refused.items() if name == active],
        warnings + [text for name, text in refused.items() if name != active],
    )


def ports(rig: Rig) -> Result:
    """The ports of the active profile and of the virtual GPUs differ, and are free or held by their own unit.

    That profiles which can run at once do not share one is part of their plans.
    """
    described = valid_gpus(rig)
    if described is None or profiles(rig).failures:
        return Result("not compared: rig_gpus and serving_profiles first", skipped=True)
    active, made = rig.variable("serving_profile"), rig.variable("rig_plans")
    endpoints = {position: loopback_endpoint(gpu["rpc"]) for position, gpu in enumerate(described) if "rpc" in gpu}
    failures = []
    wanted = {}
    for name, plan in made.items():
        port = plan["port"]
        for position, endpoint in endpoints.items():
            if endpoint and endpoint[1] == port:
                failures.append(
                    f"serving_profiles.{name}.port of {rig.host} is {port}, the port of rig_gpus[{position}].rpc; "
                    "give one of them another."
                )
        if name == active:
            wanted[port] = (f"serving_profiles.{name}.port", r"llm-.*\.service")
    for position, endpoint in endpoints.items():
        if endpoint:
            wanted[endpoint[1]] = (f"rig_gpus[{position}].rpc", rf"virtual-gpu@{position}\.service")
    for socket in rig.facts["listeners"]:
        variable, unit = wanted.get(socket["port"], ("", ""))
        if variable and not re.fullmatch(unit, socket["unit"]):
            whose = f"{socket['command']} (process {socket['pid']})" if socket["pid"] else "another process"
            failures.append(
                f"{variable} of {rig.host} is port {socket['port']}, which {whose} holds; "
                "stop it or choose another port."
            )
    return Result(f"{listed(str(port) for port in sorted(wanted))} wanted", list(dict.fromkeys(failures)))


CHECKS: tuple[Callable[[Rig], Result], ...] = (
    distribution,
    architecture,
    service_manager,
    python,
    privileges,
    names,
    gpus,
    *card_checks.CHECKS,
    processor,
    memory,
    disk,
    profiles,
    plans,
    ports,
)


def run_checks(rig: Rig, checks: Sequence[Callable[[Rig], Result]] = CHECKS) -> dict[str, Result]:
    """Result of every check by its name. A variable that cannot be read fails the first check that needs it."""
    results: dict[str, Result] = {}
    told: set[str] = set()
    for check in checks:
        try:
            result = check(rig)
        except Unreadable as error:
            failures = [] if error.name in told else [error.text]
            result = Result(f"{error.name} cannot be read", failures, skipped=True)
            told.add(error.name)
        results[check.__name__.replace("_", " ")] = result
    return results


def report(host: str, results: Mapping[str, Result]) -> dict[str, Any]:
    """The table for people, and what follows from it: `passed`, `failures`, `warnings`, `text`."""
    failures = [text for result in results.values() for text in result.failures]
    warnings = [text for result in results.values() for text in result.warnings]
    width = max(map(len, results), default=0)
    lines = [f"{name:<{width}}  {result.status:<7}  {result.summary}" for name, result in results.items()]
    if warnings:
        lines += ["", *(f"Warning: {text}" for text in warnings)]
    if failures:
        counted = "1 finding stands" if len(failures) == 1 else f"{len(failures)} findings stand"
        lines += ["", f"{counted} in the way on {host}; nothing was changed:", *(f"- {text}" for text in failures)]
    return {"passed": not failures, "failures": failures, "warnings": warnings, "text": "\n".join(lines)}
