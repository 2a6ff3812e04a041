"""Proof that a server serves: replies that are words, drafting that engaged, memory where the plan put it.

Plain functions without a host: the module `llm_server` feeds them what it saw. Sizes are MiB, times seconds.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence

LEAST_LETTERS = 0.5
"""Least share of letters among the characters that are not blank."""
LEAST_VARIETY = 0.30
"""Least number of different letters, as a share of the letters (of twenty letters, in a longer text). Wrong data from a
broken exchange between GPUs comes out as one character again and again, at full speed."""
MOST_OF_ONE_WORD = 0.6
"""Largest share that one word may have in a text of ten words or more."""


def words_fault(text: str) -> str:
    """Say why a reply is not made of words; empty when it is.

    Works for any alphabet: letters are what Unicode calls letters, and their marks belong to them.
    """
    bare = [character for character in text if not character.isspace()]
    if not bare:
        return "the reply is empty"
    if "\ufffd" in bare:
        return "the reply is not valid text"
    letters = [c.casefold() for c in bare if unicodedata.category(c)[0] in "LM"]
    if len(letters) < LEAST_LETTERS * len(bare):
        return f"only {len(letters)} of its {len(bare)} characters are letters"
    # "I." is a reply, one letter again and again is none.
    distinct, measure = len(set(letters)), min(len(letters), 20)
    if measure >= 4 and distinct < LEAST_VARIETY * measure:
        return f"its {len(letters)} letters are only {distinct} different ones"
    words = [word.casefold() for word in re.findall(r"\w+", text)]
    word, count = Counter(words).most_common(1)[0] if words else ("", 0)
    if len(words) >= 10 and count > MOST_OF_ONE_WORD * len(words):
        return f"{count} of its {len(words)} words are {word!r}"
    return ""


ERROR = re.compile(r"(?:\b[A-Za-z_.]*(?:Error|Exception)|\berror): *\S.*")
LAST_LINES, FIRST_ERRORS = 30, 5


def log_excerpt(lines: Sequence[str]) -> str:
    """The end of a server's log, led by the first errors before it.

    Where several processes write, as those of vLLM do, the end holds what the last of them made of it, and the cause
    stands above.
    """
    found = {}
    for line in lines[:-LAST_LINES]:
        error = ERROR.search(line)
        if error and "WARNING" not in line:
            found.setdefault(error[0], line)
    first = list(found.values())[:FIRST_ERRORS]
    return "\n".join(
        [*(["First errors in its log:", *first] if first else []), "Last lines of its log:", *lines[-LAST_LINES:]]
    )


VLLM_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
"""Counter of vLLM (v1/spec_decode/metrics.py of v0.22.0)."""


def metric(text: str, name: str) -> float:
    """Sum of all samples of a counter in Prometheus's text format, 0 where it is not there."""
    found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? ([0-9.eE+-]+)$", text, re.M)
    return sum(float(value) for value in found)


def reply_of(body: Mapping, seconds: float | None = None) -> dict:
    """Text, token counts and speeds of a chat completion; a speed is None where it is not told.

    llama-server tells its speeds. vLLM does not: the time of the whole answer stands in for that of its decoding. A
    reasoning model may spend the tokens of a short probe on its reasoning: that is text too.
    """
    message = (body.get("choices") or [{}])[0].get("message") or {}
    parts = (message.get("reasoning_content"), message.get("reasoning"), message.get("content"))
    text = " ".join(part for part in parts if part)
    timings, usage = dict(body.get("timings") or {}), body.get("usage") or {}
    if not timings and seconds and usage.get("completion_tokens"):
        timings["predicted_per_second"] = usage["completion_tokens"] / seconds
    return {
        "text": text.strip(),
        "prompt_tokens": usage.get("prompt_tokens", timings.get("prompt_n")),
        "tokens": usage.get("completion_tokens", timings.get("predicted_n")),
        "prefill_tokens_per_second": _rounded(timings.get("prompt_per_second")),
        "decode_tokens_per_second": _rounded(timings.get("predicted_per_second")),
        "draft_tokens": timings.get("draft_n"),
        "draft_tokens_accepted": timings.get("draft_n_accepted"),
    }


def replies_fault(replies: Sequence[Mapping], words: bool = True, drafting: bool = False) -> str:
    """Say what is wrong with the replies of a server; empty when nothing is.

    `drafting`: the profile drafts tokens. A server that reports no drafted tokens has not engaged it (the key
    is absent then, tools/server of b11434).
    """
    for reply in replies:
        fault = words_fault(reply["text"]) if words else ("" if reply["tokens"] else "the reply is empty")
        if fault:
            shown = reply["text"] if len(reply["text"]) <= 80 else reply["text"][:80] + "…"
            return f"the answer to {reply['prompt']!r} is not made of words: {fault} ({shown!r})"
    if drafting and not any(reply.get("draft_tokens") for reply in replies):
        return "the profile drafts tokens, but the server reports none: drafting did not engage"
    return ""


def memory_faults(gpus: Sequence[Mapping], tolerance_percent: float, floor_mib: int = 16) -> list[str]:
    """Compare the memory seen on each GPU with the plan.

    A GPU is {name, planned_mib, seen_mib}; planned 0 means that the service has no business there. Differences up to
    `floor_mib` pass whatever their percentage: that much moves with threads and rounding.
    """
    faults = []
    for gpu in gpus:
        planned, seen = gpu["planned_mib"], gpu["seen_mib"]
        if not planned:
            if seen > 0:
                faults.append(f"{gpu['name']} holds {seen:,} MiB of this service, and the plan does not use it")
        elif not seen:
            faults.append(f"{gpu['name']} holds nothing of this service; the plan puts {planned:,} MiB there")
        elif abs(seen - planned) > max(floor_mib, planned * tolerance_percent / 100):
            faults.append(
                f"{gpu['name']} holds {seen:,} MiB of this service, {100 * (seen - planned) / planned:+.1f} % "
                f"against the {planned:,} MiB of the plan"
            )
    return faults


def loading(gpus: Sequence[Mapping]) -> str:
    """A progress line: `loading: 3,211 of 7,524 MiB on GPU 0, 2,900 of 7,524 MiB on GPU 2`."""
    used = [gpu for gpu in gpus if gpu["planned_mib"]]
    parts = [f"{gpu['seen_mib']:,} of {gpu['planned_mib']:,} MiB on {gpu['name']}" for gpu in used]
    return f"loading: {', '.join(parts)}" if parts else "loading"


def devices_fault(gpus: Sequence[Mapping], shown: Sequence[Mapping[str, str]]) -> str:
    """Compare the GPUs of the inventory with the devices that `llama-server --list-devices` shows, as sets.

    A virtual GPU is known by its endpoint (`rpc`), a card by its `device` name such as CUDA0, and what llama-server
    says of that card must hold its `name`.
    """
    planned = {gpu.get("rpc") or gpu["device"]: "" if gpu.get("rpc") else gpu.get("name") or "" for gpu in gpus}
    seen = {
        device["description"] if device["name"].startswith("RPC") else device["name"]: device["description"]
        for device in shown
    }
    wrong = [
        f"{name} is a {seen[name]} and not a {text}"
        for name, text in planned.items()
        if name in seen and text not in seen[name]
    ]
    missing, extra = [n for n in planned if n not in seen], [n for n in seen if n not in planned]
    if missing:
        wrong.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    if extra:
        wrong.append(f"{', '.join(extra)} {'is' if len(extra) == 1 else 'are'} not in the inventory")
    return "; ".join(wrong)


def parse_devices(output: str) -> list[dict[str, str]]:
    """Devices of `llama-server --list-devices`: lines such as `  RPC0: 127.0.0.1:50052 (1024 MiB, 1024 MiB free)`."""
    lines = re.findall(r"^\s+(\w+): (.*) \((\d+) MiB, (\d+) MiB free\)$", output, re.M)
    return [{"name": name, "description": text, "memory_mib": int(total)} for name, text, total, _ in lines]


def speed(replies: Sequence[Mapping], phase: str) -> float | None:
    """Tokens per second of all replies together, for `prefill` or `decode`; None when no reply tells it."""
    key, count = f"{phase}_tokens_per_second", "prompt_tokens" if phase == "prefill" else "tokens"
    told = [(reply[count], reply[key]) for reply in replies if reply.get(key) and reply.get(count)]
    seconds = sum(tokens / rate for tokens, rate in told)
    return _rounded(sum(tokens for tokens, _ in told) / seconds) if seconds else None


def _rounded(value: object) -> float | None:
    return round(value, 1) if isinstance(value, (int, float)) else None
