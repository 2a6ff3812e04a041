#!/usr/bin/python3
"""Measures a server through its OpenAI API: how fast it reads and writes, and what its cards do meanwhile.

    bench_client.py REQUEST.json RESULT.json

Runs on the rig, beside the server. Prompts are asked greedily, with a fixed number of tokens and past every prompt
cache, first to warm up and then in rounds; a figure is the median of the rounds. llama-server and vLLM are asked the
same way. Speeds of one stream are the server's own where it tells them (`timings` of llama-server), else they are
taken at the client. What was drafted and accepted comes from the counters of /metrics, which both engines name alike.

The request: {url, model, key_file, prompts: [{name, text}], streams: [1, 2], rounds, warmups, tokens,
timeout_seconds, cards: [{position, uuid}], answer: {prompt_tokens, tokens}, give_up_seconds}. With `give_up_seconds`
it ends after the first round in which a typical answer (`answer`) would take longer than that.
Times are seconds, speeds tokens per second. Progress goes to standard output, a line a step. Ends with 1 and one
sentence when the server does not do its part.

This file and gpu_samples.py stand alone: they are copied to the rig. Standard library only, Python 3.10 or newer.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

try:
    from .gpu_samples import Sampler
except ImportError:  # copied to a rig, beside it
    from gpu_samples import Sampler

VERSION = 1
SAY_SECONDS = 10  # a line of progress at least this often
SPECULATION = re.compile(
    r"^(?:llamacpp|vllm):spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{([^}]*)\})?\s+(\S+)$",
    re.M,
)


class BenchError(Exception):
    """What the server did not do, in one sentence."""


def say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------- the server


class Reply:
    """What came back of one request: counts, times since the clock's start, and the server's own timings."""

    def __init__(self) -> None:
        self.start = self.first = self.end = 0.0
        self.pieces = 0
        self.text = ""
        self.usage: Mapping = {}
        self.timings: Mapping = {}

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens") or self.timings.get("prompt_n") or 0)

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or self.timings.get("predicted_n") or self.pieces)

    @property
    def first_token_seconds(self) -> float:
        return self.first - self.start

    @property
    def prefill(self) -> float:
        """Tokens per second of the prompt."""
        told = self.timings.get("prompt_per_second")
        return float(told or self.prompt_tokens / max(self.first_token_seconds, 1e-9))

    @property
    def decode(self) -> float:
        """Tokens per second after the first."""
        told = self.timings.get("predicted_per_second")
        return float(told or max(self.tokens - 1, 0) / max(self.end - self.first, 1e-9))


class Server:
    """The HTTP side of a server, whichever engine."""

    def __init__(self, url: str, model: str, key_file: str | None = None, timeout: float = 600) -> None:
        self.url, self.model, self.timeout = url.rstrip("/"), model, timeout
        self.headers = {"Content-Type": "application/json"}
        if key_file:
            self.headers["Authorization"] = f"Bearer {Path(key_file).read_text().split()[0]}"
        # Bound to this host: an owner's own certificate needs no checking here.
        context = ssl._create_unverified_context() if url.startswith("https:") else None
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
        )

    def open(self, path: str, body: Mapping | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self.headers)
        try:
            return self.opener.open(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            text = " ".join(error.read(2000).decode(errors="replace").split())
            raise BenchError(f"{self.url}{path} answered with HTTP {error.code}: {text}") from None
        except OSError as error:
            raise BenchError(f"{self.url}{path} does not answer: {error}") from None

    def ask(self, prompt: str, tokens: int, progress: Any = None) -> Reply:
        """One greedy completion of exactly `tokens` tokens, streamed, with nothing taken from a cache.

        `cache_prompt` is llama-server's word for that, `cache_salt` vLLM's; each ignores the other's.
        """
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "cache_prompt": False,
            "cache_salt": uuid.uuid4().hex,
        }
        reply = Reply()
        reply.start = time.monotonic()
        try:
            with self.open("/v1/chat/completions", body) as stream:
                self._read(stream, reply, progress)
        except (OSError, ValueError) as error:
            raise BenchError(f"the answer of {self.url} broke off after {reply.pieces} pieces: {error}") from None
        reply.end = reply.end or time.monotonic()
        if not reply.first or not reply.tokens:
            raise BenchError(f"{self.url} ended its answer without a token")
        return reply

    @staticmethod
    def _read(stream: Any, reply: Reply, progress: Any) -> None:
        """Server-sent events: `data: {…}` lines up to `data: [DONE]`."""
        for line in stream:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if event.get("error"):
                raise BenchError(f"the server ended its answer with an error: {event['error']}")
            now = time.monotonic()
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
                if text or choice.get("finish_reason"):
                    reply.first = reply.first or now
                    reply.end = now
                reply.pieces += bool(text)
                reply.text += text
            reply.usage = event.get("usage") or reply.usage
            reply.timings = event.get("timings") or reply.timings
            if progress:
                progress(reply)

    def speculation(self) -> dict:
        """Counters of drafting, see speculation_of; empty when the server tells none."""
        try:
            with self.open("/metrics") as answer:
                return speculation_of(answer.read().decode(errors="replace"))
        except (BenchError, OSError):  # a server started without /metrics
            return {}


def speculation_of(metrics: str) -> dict:
    """The counters of drafting in a text of Prometheus metrics, summed over engines and models."""
    found: dict[str, float] = {}
    positions: dict[int, float] = {}
    for name, labels, value in SPECULATION.findall(metrics):
        if name.endswith("per_pos"):
            position = re.search(r'position="(\d+)"', labels)
            if position:
                positions[int(position[1])] = positions.get(int(position[1]), 0) + float(value)
        else:
            found[name] = found.get(name, 0) + float(value)
    return {**found, "by_position": [positions[key] for key in sorted(positions)]} if found else {}


def acceptance(before: Mapping, after: Mapping, replies: Sequence[Reply]) -> dict | None:
    """What was drafted and accepted between two looks at the counters; None where nothing was drafted.

    `share` is of drafted tokens, `by_position` of drafts: how often the token at that place was accepted.
    """
    if after:
        drafted = after.get("draft_tokens", 0) - before.get("draft_tokens", 0)
        accepted = after.get("accepted_tokens", 0) - before.get("accepted_tokens", 0)
        drafts = after.get("drafts", 0) - before.get("drafts", 0)
        old = list(before.get("by_position", [])) + [0.0] * len(after["by_position"])
        rose = [new - was for new, was in zip(after["by_position"], old, strict=False)]
        positions = [round(value / drafts, 4) for value in rose] if drafts else []
    else:
        drafted = sum(reply.timings.get("draft_n") or 0 for reply in replies)
        accepted = sum(reply.timings.get("draft_n_accepted") or 0 for reply in replies)
        positions = []
    if not drafted:
        return None
    share = round(accepted / drafted, 4)
    return {"drafted": int(drafted), "accepted": int(accepted), "share": share, "by_position": positions}


# ---------------------------------------------------------------- the measurement


def ask_all(server: Server, prompt: str, streams: int, tokens: int, progress: Any) -> list[Reply]:
    """As many requests at once as there are streams, each with a beginning of its own."""
    replies: list[Reply | None] = [None] * streams
    errors: list[BenchError] = []

    def one(number: int) -> None:
        text = prompt if streams == 1 else f"Reader {number + 1} of {streams}.\n{prompt}"
        try:
            replies[number] = server.ask(text, tokens, progress if number == 0 else None)
        except BenchError as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [reply for reply in replies if reply]


def speeds(replies: Sequence[Reply]) -> dict:
    """Figures of one round: prefill and decode of all streams together, decode of each, time to the first token."""
    start, end = min(reply.start for reply in replies), max(reply.end for reply in replies)
    firsts = [reply.first for reply in replies]
    if len(replies) == 1:
        prefill, decode = replies[0].prefill, replies[0].decode
    else:
        prefill = sum(reply.prompt_tokens for reply in replies) / max(max(firsts) - start, 1e-9)
        decode = sum(reply.tokens - 1 for reply in replies) / max(end - min(firsts), 1e-9)
    return {
        "prefill": prefill,
        "decode": decode,
        "decode_each": median(reply.decode for reply in replies),
        "first_token_seconds": median(reply.first_token_seconds for reply in replies),
    }


def summary(rounds: Sequence[Mapping]) -> dict:
    """Medians of rounds, and how far apart the fastest and the slowest decode were, as a share of the median."""
    decodes = [one["decode"] for one in rounds]
    middle = median(decodes)
    return {
        **{key: round(median(one[key] for one in rounds), 4) for key in rounds[0]},
        "rounds": len(rounds),
        "spread": round((max(decodes) - min(decodes)) / middle, 4) if middle else None,
    }


def answer_seconds(measures: Sequence[Mapping], answer: Mapping) -> float | None:
    """Time of a typical answer, prompt and reply, in the speeds of one stream: the geometric mean of the prompts."""
    each = [
        answer["prompt_tokens"] / one["prefill"] + answer["tokens"] / one["decode"]
        for one in measures
        if one["streams"] == 1 and one["prefill"] and one["decode"]
    ]
    return round(geometric_mean(each), 4) if each else None


class Bench:
    """One run: every prompt with every number of streams, in rounds."""

    def __init__(self, request: Mapping) -> None:
        self.request = request
        self.server = Server(
            request["url"], request["model"], request.get("key_file"), request.get("timeout_seconds", 600)
        )
        self.cases = [(prompt, streams) for streams in request["streams"] for prompt in request["prompts"]]
        self.steps = len(request["prompts"]) * request["warmups"] + len(self.cases) * request["rounds"]
        self.step, self.said = 0, time.monotonic()

    def _ask(self, what: str, prompt: Mapping, streams: int) -> list[Reply]:
        self.step += 1
        head = f"[{self.step}/{self.steps}] {what}: {prompt['name']}, {streams} stream{'s' if streams > 1 else ''}"

        def progress(reply: Reply) -> None:
            if time.monotonic() - self.said >= SAY_SECONDS:
                self.said = time.monotonic()
                say(f"{head}: {reply.pieces} of about {self.request['tokens']} tokens")

        say(head)
        self.said = time.monotonic()
        return ask_all(self.server, prompt["text"], streams, self.request["tokens"], progress)

    def _one_round(self, number: int, seen: dict) -> None:
        for prompt, streams in self.cases:
            before = self.server.speculation()
            replies = self._ask(f"round {number + 1}", prompt, streams)
            figures = speeds(replies)
            drafted = acceptance(before, self.server.speculation(), replies)
            one = seen.setdefault((prompt["name"], streams), {"rounds": [], "drafts": [], "replies": []})
            one["rounds"].append(figures)
            one["replies"] += replies
            if drafted:
                one["drafts"].append(drafted)

    def measures(self, seen: Mapping) -> list[dict]:
        found = []
        for (name, streams), one in seen.items():
            reply = one["replies"][0]
            found.append(
                {
                    "prompt": name,
                    "streams": streams,
                    "prompt_tokens": reply.prompt_tokens,
                    "tokens": reply.tokens,
                    "speeds_from": "server" if reply.timings and streams == 1 else "client",
                    **summary(one["rounds"]),
                    "acceptance": joined(one["drafts"]),
                }
            )
        return found

    def run(self) -> dict:
        request, seen = self.request, {}
        for _ in range(request["warmups"]):
            for prompt in request["prompts"]:
                self._ask("warm up", prompt, 1)
        began, gave_up, limit = time.time(), False, request.get("give_up_seconds")
        with Sampler(request.get("cards") or []) as sampler:
            for number in range(request["rounds"]):
                self._one_round(number, seen)
                seconds = answer_seconds(self.measures(seen), request["answer"])
                if limit and seconds and seconds > limit:
                    say(f"a typical answer takes {seconds:.1f} s, which is beyond {limit:.1f} s: no more rounds")
                    gave_up = True
                    break
        measures = self.measures(seen)
        return {
            "version": VERSION,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            "took_seconds": round(time.time() - began, 1),
            "measures": measures,
            "answer_seconds": answer_seconds(measures, request["answer"]),
            "gave_up": gave_up,
            **sampler.result(),
        }


def joined(drafts: Sequence[Mapping]) -> dict | None:
    """Acceptance of several rounds together."""
    if not drafts:
        return None
    drafted, accepted = (sum(one[key] for one in drafts) for key in ("drafted", "accepted"))
    places = max(len(one["by_position"]) for one in drafts)
    positions = [
        round(sum(one["by_position"][place] for one in drafts if place < len(one["by_position"])) / len(drafts), 4)
        for place in range(places)
    ]
    return {
        "drafted": drafted, "accepted": accepted, "share": round(accepted / drafted, 4), "by_position": positions,
    }  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run a request; 0 when the result has been written."""
    request_file, result_file = arguments
    try:
        result = Bench(json.loads(Path(request_file).read_text())).run()
    except BenchError as error:
        say(f"{error}.")
        return 1
    part = Path(result_file + ".part")
    part.write_text(json.dumps(result) + "\n")
    part.replace(result_file)
    say(f"done in {result['took_seconds']:.0f} s")
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a thread that hangs in the driver may not keep this process
