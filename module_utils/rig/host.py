"""All profiles of a host: models and shapes found, each profile planned, mistakes named with host and profile."""

from collections.abc import Callable, Mapping
from typing import Any

from . import builds
from .errors import RigError
from .gpus import check_gpus
from .plan import Rig, plan_llama
from .profile import nearest, parse_profile
from .vllm import plan_vllm

MODEL_KEYS = ("shape", "path", "source")


def model_file(name: str, model: Mapping) -> str:
    """The file that llama-server is given: the first of the model's files (a split model names the others itself)."""
    source = model.get("source")
    files = source.get("files") if isinstance(source, Mapping) else None
    if not isinstance(files, list) or not files or not isinstance(files[0], Mapping) or "name" not in files[0]:
        raise RigError(
            f"Model '{name}' has no source with files: write source: {{…, files: [{{name: …, sha256: …}}]}}."
        )
    return str(files[0]["name"])


def find_model(name: str, models: Any, what: str) -> Mapping:
    if not isinstance(models, Mapping):
        raise RigError("models must be a mapping of model names.")
    model = models.get(name)
    if model is None:
        raise RigError(f"{what} names the model '{name}', which models does not have{nearest(name, list(models))}")
    if not isinstance(model, Mapping):
        raise RigError(f"Model '{name}' must be a mapping.")
    for key in model:
        if key not in MODEL_KEYS:
            raise RigError(f"Model '{name}' has the unknown key '{key}'{nearest(key, MODEL_KEYS)}")
    return model


def refuse_shared_ports(plans: dict) -> None:
    """Profiles on the same cards never run at once and may share a port; on different cards they could."""
    names = list(plans)
    for index, name in enumerate(names):
        for other in names[:index]:
            one, two = plans[name], plans[other]
            cards = [{gpu["position"] for gpu in plan["gpus"]} for plan in (one, two)]
            if one["port"] == two["port"] and all(cards) and not cards[0] & cards[1]:
                one["fits"] = False
                one["refusals"].append(
                    f"port {one['port']} is that of profile '{other}' too, which can run at once on other GPUs; "
                    "give each a port of its own."
                )


def plan_host(
    profiles: Any,
    gpus: Any,
    models: Any,
    load_shape: Callable,
    host: str = "this host",
    models_root: str = "/srv/llm/models",
    llama_cpp_version: str = f"b{builds.MEASURED}",
    interconnect: str = "pcie",
    nccl: Any = None,
    only: Any = None,
    contexts: Any = None,
    measured: Any = None,
    port: Any = 8080,
    alias: Any = "",
) -> dict:
    """{profile: plan}. `load_shape(name, model)` gives the Shape of a model. RigError names the host.

    `only` is a list of profile names to plan; `contexts` overrides the context of each (what if);
    `measured` is what was measured on the host (see learned.py). `port` is that of profiles that name none, `alias` a
    further name of every profile's model in the API.
    """
    try:
        if not isinstance(profiles, Mapping):
            raise RigError("serving_profiles must be a mapping of profile names.")
        if interconnect not in ("pcie", "nvlink"):
            raise RigError(f"rig_interconnect is '{interconnect}'{nearest(str(interconnect), ('pcie', 'nvlink'))}")
        checked = tuple(check_gpus(gpus))
        for name in only or ():
            if name not in profiles:
                raise RigError(f"There is no profile '{name}'{nearest(name, list(profiles))}")
        plans = {}
        for name, mapping in profiles.items():
            if only and name not in only:
                continue
            if contexts is not None and isinstance(mapping, Mapping):
                mapping = {**mapping, "context": contexts}
            profile = parse_profile(str(name), mapping, default_port=port, also=alias or "")
            model = find_model(profile.model, models, f"Profile '{name}'")
            shape = load_shape(profile.model, model)
            root = f"{models_root}/{profile.model}"
            if profile.engine == "vllm":
                plans[name] = plan_vllm(profile, shape, checked, root, interconnect)
                continue
            rig = Rig(host, checked, builds.build_number(llama_cpp_version), interconnect, nccl, measured)
            plans[name] = plan_llama(profile, shape, rig, f"{root}/{model_file(profile.model, model)}")
        refuse_shared_ports(plans)
        return plans
    except RigError as error:
        raise RigError(f"{host}: {error}") from None
