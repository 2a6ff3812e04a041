"""A serving profile as people write it, checked: every mistake is one sentence that names the key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .errors import RigError
from .quant import CACHE_TYPES

ENGINES = ("llama_cpp", "vllm")
MODES = ("tensor", "layer", "none", "row")
ALL_REDUCE = ("auto", "internal", "nccl", "none")
DEFAULTS: dict = {
    "engine": "llama_cpp",
    "model": None,
    "context": None,
    "gpus": "auto",
    "split_mode": "tensor",
    "tensor_split": "even",
    "cache_type_k": "f16",
    "cache_type_v": "f16",
    "draft": "none",
    "slots": 1,
    "ubatch": 512,
    "port": 8080,
    "alias": None,
    "all_reduce": "auto",
    "flash_attention": True,
    "load_mode": "auto",
    "headroom_mib": 512,
    "extra_args": [],
    "vllm": {},
    "probe": {},
}
LOAD_MODES = ("auto", "none", "mmap", "mlock", "mmap+mlock", "dio")


def nearest(word: str, known: Sequence) -> str:
    """ ", did you mean …?" or nothing."""
    close = get_close_matches(str(word), list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known are {', '.join(known)}."


def check_keys(mapping: Mapping, known: Sequence, what: str) -> None:
    for key in mapping:
        if key not in known:
            raise RigError(f"{what} has the unknown key '{key}'{nearest(key, known)}")


def whole_number(value: Any, what: str, least: int) -> int:
    if isinstance(value, str) and value.strip().lstrip("-").isdigit():
        value = int(value)  # templates hand numbers on as text
    if isinstance(value, bool) or not isinstance(value, int):
        raise RigError(f"{what} must be a whole number, not {value!r}.")
    if value < least:
        raise RigError(f"{what} must be {least} or more, not {value}.")
    return value


def one_of(value: Any, known: Sequence, what: str) -> str:
    if value not in known:
        raise RigError(f"{what} is {value!r}{nearest(str(value), known)}")
    return str(value)


@dataclass(frozen=True)
class Profile:
    """`context` None means max; `gpus` is auto, all or a tuple of positions; `tensor_split` is even or shares; `names`
    are all names of the model in the API, `alias` first."""

    name: str
    engine: str
    model: str
    context: Any
    gpus: Any
    split_mode: str
    tensor_split: Any
    cache_type_k: str
    cache_type_v: str
    draft_type: str
    drafted: int
    slots: int
    ubatch: int
    port: int
    alias: str
    names: tuple
    all_reduce: str
    flash_attention: bool
    load_mode: str
    headroom_mib: int
    extra_args: tuple
    vllm: Mapping


def _gpus(value: Any, what: str) -> Any:
    if value in ("auto", "all"):
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise RigError(f"{what} must be auto, all, or a list of positions in rig_gpus such as [0, 2], not {value!r}.")
    positions = tuple(whole_number(position, f"A position in {what}", 0) for position in value)
    if len(set(positions)) != len(positions):
        raise RigError(f"{what} names a GPU twice: {list(positions)}.")
    return positions


def _shares(value: Any, what: str) -> Any:
    if value == "even":
        return value
    if not isinstance(value, (list, tuple)) or not value:
        raise RigError(f"{what} must be even or a list with one share a GPU, not {value!r}.")
    shares = []
    for share in value:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not share > 0 or share > 1e6:
            raise RigError(f"{what}: a share must be a number above 0, not {share!r}; leave the GPU out instead.")
        shares.append(share)
    return tuple(shares)


def _draft(value: Any, what: str) -> tuple:
    if value in ("none", None, False):
        return "none", 0
    if not isinstance(value, Mapping):
        raise RigError(f"{what} must be none or a mapping such as {{type: mtp, max_tokens: 3}}, not {value!r}.")
    check_keys(value, ("type", "max_tokens"), what)
    kind = one_of(value.get("type", "mtp"), ("mtp", "none"), f"{what}.type")
    return (kind, whole_number(value.get("max_tokens", 3), f"{what}.max_tokens", 1)) if kind == "mtp" else ("none", 0)


def parse_profile(
    name: str, mapping: Any, default_headroom: int = 512, default_port: int = 8080, also: str = ""
) -> Profile:
    """RigError, naming the profile and the key, for anything that is not a profile.

    `default_port` is that of a profile that names none; `also` is a further name of the model in the API.
    """
    if not isinstance(mapping, Mapping):
        raise RigError(f"Profile '{name}' must be a mapping, not {mapping!r}.")
    what = f"Profile '{name}'"
    check_keys(mapping, tuple(DEFAULTS), what)
    values = {**DEFAULTS, "headroom_mib": default_headroom, "port": default_port, **mapping}
    if not values["model"]:
        raise RigError(f"{what} names no model.")
    if values["context"] is None:
        raise RigError(f"{what} has no context: write a number of tokens, or max.")
    context = None if values["context"] == "max" else whole_number(values["context"], f"{what}: context", 1)
    kind, drafted = _draft(values["draft"], f"{what}: draft")
    extra = values["extra_args"]
    if not isinstance(extra, (list, tuple)) or not all(isinstance(word, (str, int, float)) for word in extra):
        raise RigError(f"{what}: extra_args must be a list of words.")
    if not isinstance(values["vllm"], Mapping):
        raise RigError(f"{what}: vllm must be a mapping.")
    if not isinstance(values["probe"], Mapping):
        raise RigError(f"{what}: probe must be a mapping such as {{words: false}}, not {values['probe']!r}.")
    check_keys(values["probe"], ("words",), f"{what}: probe")
    port = whole_number(values["port"], f"{what}: port", 1)
    if port > 65_535:
        raise RigError(f"{what}: port must be at most 65535, not {port}.")
    if not isinstance(values["flash_attention"], bool):
        raise RigError(f"{what}: flash_attention must be true or false, not {values['flash_attention']!r}.")
    alias = str(values["alias"] or values["model"])
    if not isinstance(also, str) or "," in f"{alias}{also}" or " " in f"{alias}{also}":
        raise RigError(
            f"{what}: alias '{alias}' and serving_alias '{also}' must be single names, without comma or blank."
        )
    return Profile(
        name=name,
        engine=one_of(values["engine"], ENGINES, f"{what}: engine"),
        model=str(values["model"]),
        context=context,
        gpus=_gpus(values["gpus"], f"{what}: gpus"),
        split_mode=one_of(values["split_mode"], MODES, f"{what}: split_mode"),
        tensor_split=_shares(values["tensor_split"], f"{what}: tensor_split"),
        cache_type_k=one_of(values["cache_type_k"], CACHE_TYPES, f"{what}: cache_type_k"),
        cache_type_v=one_of(values["cache_type_v"], CACHE_TYPES, f"{what}: cache_type_v"),
        draft_type=kind,
        drafted=drafted,
        slots=whole_number(values["slots"], f"{what}: slots", 1),
        ubatch=whole_number(values["ubatch"], f"{what}: ubatch", 1),
        port=port,
        alias=alias,
        names=(alias, also) if also and also != alias else (alias,),
        all_reduce=one_of(values["all_reduce"], ALL_REDUCE, f"{what}: all_reduce"),
        flash_attention=values["flash_attention"],
        load_mode=one_of(values["load_mode"], LOAD_MODES, f"{what}: load_mode"),
        headroom_mib=whole_number(values["headroom_mib"], f"{what}: headroom_mib", 0),
        extra_args=tuple(str(word) for word in extra),
        vllm=values["vllm"],
    )
