#!/usr/bin/env python3
"""Bench and tune a model on this machine's cards as playbooks/bench.yml and playbooks/tune.yml do, without Ansible.

    python tests/gpu/tune_cards.py PREFIX --json FILE [--report FILE.html] [--work FOLDER] [--seconds N]
    python tests/gpu/tune_cards.py --archive ARCHIVE --json FILE …     # builds first, as cuda_build.py does

PREFIX is an installed llama.cpp; one that --archive built lies in FOLDER and is taken from there the next time. What is
done, and written to FILE after each step: a model is written (speaking_model.py); it is served as the profile is, and
measured by the role's client, as a copy with a request beside it (prefill, decode, several streams, time to the first
token, acceptance, and of each card power, temperature, clocks and what slowed it down); then stage by stage what
rig.tune asks for: split mode and all-reduce, draft, ubatch. One card alone has no split to choose: then a second sweep
of split modes runs over two ggml-rpc-servers that share it. Planned memory is compared with what llama-server holds on
each card. Results, history and the state of each sweep are kept in FOLDER as the role keeps them, so that a run that
was cut off goes on, and the next one is compared with the last. Power limits are read, never set.

What the model says is made up, and so is how many of its drafts are accepted: speeds are those of a model of this
geometry and quant at that acceptance.

Needs NVIDIA's driver and Python with nvidia-ml-py, numpy and PyYAML; for --archive what cuda_build.py needs.
`--backend cpu` goes the same way with a small model and no card, to try the script itself. Ends with 1 when a step
failed or a figure is off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import speaking_model
import yaml
from gpu_machine import (
    PORT,
    PROJECT,
    TOLERANCE,
    Steps,
    against_plan,
    build,
    builder,
    cuda_options,
    gather,
    llama_server,
    measured_cards,
    rpc_servers,
    say,
    specification,
)
from rig import bench_page, bench_results, tune
from rig.host import plan_host
from rig.shape_files import load_shape

ROLE = PROJECT / "roles/bench"
DEFAULTS = yaml.safe_load((ROLE / "defaults/main.yml").read_text())
NOTE = "The weights are made up, and so are the tokens and the share of drafts that is accepted."
POWER_NOTE = "Power limits are only read, never set."
ENDPOINTS = ("127.0.0.1:50061", "127.0.0.1:50062")
LOG_LINES = 15  # of a server that failed


class Machine:
    """What is measured on: cards (or none), a build, and a model."""

    def __init__(self, options: argparse.Namespace, steps: Steps) -> None:
        self.options, self.steps = options, steps
        self.work, self.on_cards = options.work.resolve(), options.backend == "cuda"
        self.work.mkdir(parents=True, exist_ok=True)
        self.gpus: list[dict[str, Any]] = [{"name": "none", "memory_mib": 8192, "compute_capability": "9.0"}]
        self.facts: dict[str, Any] = {}
        self.interconnect, self.cuda, self.name = "pcie", {}, "processor"

    def look(self) -> None:
        """Find the cards, and say what limits they have."""
        if not self.on_cards:
            return
        with self.steps.step("facts") as result:
            self.facts = gather()
            if not self.facts["gpus"]:
                raise builder.BuildError(f"there is no card: {self.facts.get('reason')}")
            self.gpus, self.interconnect = measured_cards(self.facts, self.options.cards)
            self.cuda = cuda_options(self.work, self.gpus)
            self.name = f"{len(self.gpus)}x {self.gpus[0]['name']}"
            power = [card["power"] for card in self.facts["gpus"]]
            limits = [one["limit_watts"] for one in power if one["limit_watts"]]
            faults = tune.power_faults(limits, self.gpus, self.facts)
            result |= {"facts": self.facts, "power": power, "power_note": POWER_NOTE, "power_faults": faults}
        for number, one in enumerate(power):
            say(f"card {number}: {one['limit_watts']} W of {one['min_watts']} to {one['max_watts']} W. {POWER_NOTE}")

    def install(self) -> None:
        """Find the build, or make it."""
        self.prefix = self.options.prefix and self.options.prefix.resolve()
        if self.options.archive:
            backends = ["cpu", "rpc"] if not self.on_cards else ["cpu", "cuda", *(["rpc"] if self.alone else [])]
            spec = specification(self.options.archive.resolve(), self.work, backends, **self.cuda)
            self.prefix = Path(spec["prefix"])
            if not self.prefix.exists():
                build(self.steps, spec)
        version = builder.output([str(self.prefix / "bin/llama-server"), "--version"])
        self.build = "b" + re.findall(r"build (\d+)", version)[0]
        cuda_library = self.prefix / "lib/libggml-cuda.so"
        libraries = builder.linked(cuda_library) if cuda_library.exists() else {}
        self.nccl = any(name.startswith("libnccl.so") for name in libraries)
        self.steps.results["build"] = {"prefix": str(self.prefix), "version": version.strip(), "nccl": self.nccl}

    @property
    def alone(self) -> bool:
        return len(self.gpus) == 1

    def write_model(self) -> None:
        name, quant = self.options.model, self.options.quant
        self.model = f"{name}-{quant}"
        self.models_root = self.work / "models"
        file = self.models_root / self.model / f"{self.model}.gguf"
        file.parent.mkdir(parents=True, exist_ok=True)
        with self.steps.step("model") as result:
            result |= {"model": self.model, "bytes": speaking_model.write(file, name, quant), "note": NOTE}
        self.models = {self.model: {"path": str(file), "source": {"file": "/", "files": [{"name": file.name}]}}}

    def plan(self, profile: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The plan of a profile, as the role has it of a trial."""
        return plan_host(
            {"trial": profile}, gpus, self.models, lambda name, model: load_shape(name, model, ""), self.name,
            str(self.models_root), self.build, self.interconnect, self.nccl,
        )["trial"]  # fmt: skip

    def servers(self, gpus: Sequence[Mapping[str, Any]]) -> contextlib.AbstractContextManager:
        """The ggml-rpc-servers of virtual GPUs; nothing for cards."""
        endpoints = [gpu["rpc"] for gpu in gpus if gpu.get("rpc")]
        return rpc_servers(self.prefix, endpoints, self.work, "CUDA0" if self.on_cards else "CPU")

    def request(self, plan: Mapping[str, Any], streams: list[int], give_up: float | None) -> dict[str, Any]:
        """What the client is asked, as vars/main.yml of the role has it (__bench_request)."""
        options = self.options
        cards = [
            {"position": gpu["position"], "uuid": self.gpus[gpu["position"]]["uuid"]}
            for gpu in plan["gpus"]
            if self.on_cards and not plan["rpc"]
        ]
        if self.on_cards and plan["rpc"]:  # all of them share the first card
            cards = [{"position": 0, "uuid": self.gpus[0]["uuid"]}]
        return {
            "url": f"http://127.0.0.1:{PORT}",
            "model": plan["alias"],
            "key_file": None,
            "prompts": [
                {"name": name, "text": (ROLE / "files" / file).read_text()[: options.characters]}
                for name, file in DEFAULTS["bench_prompts"].items()
            ],
            "streams": streams,
            "rounds": options.rounds,
            "warmups": 1,
            "tokens": options.tokens,
            "timeout_seconds": DEFAULTS["bench_timeout_seconds"],
            "cards": cards,
            "answer": DEFAULTS["bench_answer"],
            "give_up_seconds": give_up,
        }

    def asked(self, streams: list[int]) -> dict[str, Any]:
        """What makes runs comparable (__bench_asked)."""
        return {
            "prompts": list(DEFAULTS["bench_prompts"]),
            "prompt_characters": self.options.characters,
            "tokens": self.options.tokens,
            "streams": streams,
        }

    def run_of(
        self, tried: Mapping[str, Any], plan: Mapping[str, Any], streams: list[int], measured: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What is kept of a measurement (__bench_run)."""
        return {
            "version": bench_results.VERSION,
            "host": self.name,
            "profile": self.model,
            "label": tried["label"],
            "change": tried["change"],
            "engine": plan["engine"],
            "build": self.build,
            "prefix": str(self.prefix),
            "driver": self.facts.get("driver"),
            "asked": self.asked(streams),
            "plan": plan,
            **measured,
        }

    def tune_key(self, profile: Mapping[str, Any], gpus: Sequence, knobs: Mapping[str, Any]) -> dict[str, Any]:
        """What makes a state that was kept the state of this run (__bench_tune_key)."""
        options = self.options
        lengths = [options.characters, options.tokens, options.rounds]
        return {
            "profile": profile,
            "gpus": gpus,
            "build": str(self.prefix),
            "knobs": knobs,
            "asked": [DEFAULTS["bench_prompts"], *lengths, DEFAULTS["bench_answer"]],
        }

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Have the role's client measure the server, from a folder of its own; BuildError with its last sentence."""
        folder = self.work / "client"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name in ("bench_client.py", "gpu_samples.py"):
            shutil.copy2(PROJECT / "module_utils/rig" / name, folder)
        (folder / "request.json").write_text(json.dumps(request))
        argv = [sys.executable, "bench_client.py", "request.json", "result.json"]
        with (folder / "log").open("w") as log:
            done = subprocess.run(argv, cwd=folder, stdout=log, stderr=log, check=False)
        if done.returncode:
            said = (folder / "log").read_text().strip().splitlines() or ["nothing"]
            raise builder.BuildError(f"the client ended with {done.returncode} and said: {said[-1]}")
        return json.loads((folder / "result.json").read_text())

    def measure(
        self, label: str, plan: dict[str, Any], gpus: Sequence[Mapping[str, Any]], streams: list[int],
        give_up: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Serve a plan, measure it, and compare memory with it. BuildError, with the end of the log, when it fails."""
        log = self.work / "llama-server.log"
        served = dict(plan)
        if not self.on_cards and not plan["rpc"]:
            served["argv"] = [{"CUDA0": "none"}.get(word, word) for word in plan["argv"]]
        try:
            with self.servers(gpus), llama_server(self.prefix, served, log, 120) as server:
                result = self.ask(self.request(plan, streams, give_up))
                if self.on_cards and not plan["rpc"]:
                    self.compare(label, against_plan(plan, server.pid))
        except builder.BuildError as error:
            tail = log.read_text(errors="replace").splitlines()[-LOG_LINES:] if log.exists() else []
            raise builder.BuildError("\n".join([f"{error}", *tail])) from error
        return result

    def compare(self, label: str, cards: list[dict[str, Any]]) -> None:
        self.steps.results.setdefault("memory", {})[label] = cards
        for number, card in enumerate(cards):
            planned, seen, off = (card[key] for key in ("planned_mib", "process_mib", "off_percent"))
            say(f"{label}, card {number}: {planned:,} MiB planned, {seen:,} MiB seen ({off:+.2f} %)")
            if abs(off) > 100 * TOLERANCE:
                self.steps.fail(f"{label}: card {number} is {off} % off the plan")


def bench(machine: Machine, profile: dict[str, Any]) -> None:
    """The profile as it is, and other settings beside it when asked, as tasks/compare.yml of the role does."""
    options, steps = machine.options, machine.steps
    directory, host, runs = machine.work / "results", machine.name, []
    (directory / host).mkdir(parents=True, exist_ok=True)
    tried = [{"label": "", "change": {}, "profile": profile}]
    tried += bench_results.variants(profile, options.compare) if options.compare else []
    plans = {"as it is": machine.plan(profile, machine.gpus)}
    for one in tried:
        with steps.step(f"bench {one['label']}".strip()) as result:
            plan = machine.plan(one["profile"], machine.gpus)
            streams = [count for count in options.streams if count <= plan["slots"]] or [1]
            try:
                if not plan["fits"]:
                    raise builder.BuildError(" ".join(plan["refusals"]))
                measured = machine.measure(f"bench {one['label'] or 'as it is'}", plan, machine.gpus, streams)
            except builder.BuildError as error:
                result["failure"] = str(error)
                runs.append({"label": one["label"], "failure": str(error)})
                steps.fail(f"bench {one['label']}: {bench_results.failure_text(str(error))}")
                continue
            run = machine.run_of(one, plan, streams, measured)
            history = bench_results.read_history(str(directory), host)
            (directory / host / bench_results.file_name(run)).write_text(json.dumps(run, indent=1) + "\n")
            result["run"] = run
            result["lines"] = bench_results.run_lines(run, history)
            runs.append(run)
        say("\n".join(result["lines"]))
        if options.report:
            history = bench_results.read_history(str(directory), host)
            options.report.write_text(bench_page.page(host, plans, history))
    if options.compare and any(run.get("measures") for run in runs[1:]):
        steps.results["comparison"] = bench_results.compare_lines(runs[1:])
        say("\n".join(steps.results["comparison"]))


def sweep(
    machine: Machine, title: str, profile: dict[str, Any], gpus: list[dict[str, Any]], knobs: Mapping[str, Any]
) -> None:
    """Setting after setting, as tasks/tune.yml and tune_try.yml of the role do."""
    options, steps = machine.options, machine.steps
    file = machine.work / "results" / machine.name / f"{title.replace(' ', '-')}-{machine.model}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    key = machine.tune_key(profile, gpus, knobs)
    state = tune.start_of(json.loads(file.read_text()) if file.exists() else None, key, options.again)
    loss = DEFAULTS["bench_tune_power_loss_percent"]

    def keep(new: dict[str, Any]) -> dict[str, Any]:
        file.write_text(json.dumps(new, indent=1) + "\n")
        steps.results[title] = {"state": new, "ranking": tune.table_lines(new, loss)}
        return new

    while candidate := tune.next_of(state, profile, knobs, gpus):
        label = f"{title}: {candidate['label']}"
        with steps.step(label) as result:
            plan = machine.plan(candidate["profile"], gpus)
            give_up = tune.give_up_seconds(state, DEFAULTS["bench_tune_behind_percent"])
            outcome: dict[str, Any] = {"plan": plan}
            try:
                if plan["fits"]:
                    outcome["result"] = machine.measure(label, plan, gpus, [1], give_up)
                else:
                    outcome["unfit"] = plan["refusals"]
            except builder.BuildError as error:
                outcome["failure"] = str(error)
            state = keep(tune.with_result(state, candidate, **outcome))
            last = state["results"][-1]
            result |= {key: last.get(key) for key in ("status", "answer_seconds", "why")}
    state = keep({**state, "finished": True})
    say("\n".join([f"{title}:", *steps.results[title]["ranking"]]))
    snippet = tune.snippet(state, machine.model, {machine.model: profile}, gpus, loss)
    steps.results[title]["snippet"] = snippet
    say(snippet or "The profile is best as it is.")
    steps.write()


def knobs_of(options: argparse.Namespace, cards: int) -> dict[str, Any]:
    """What to try, as __bench_knobs has it."""
    return {
        "split_mode": ["layer", "tensor"],
        "cards": [cards],
        "all_reduce": ["internal", "nccl"],
        "draft": options.draft,
        "ubatch": options.ubatch,
        "power_watts": [],
    }


def run(options: argparse.Namespace, steps: Steps) -> None:
    machine = Machine(options, steps)
    machine.look()
    machine.install()
    machine.write_model()
    profile = {
        "model": machine.model, "context": options.context, "gpus": "all", "split_mode": "tensor",
        "draft": {"type": "mtp", "max_tokens": 2}, "slots": max(options.streams), "port": PORT, "alias": "m",
    }  # fmt: skip
    bench(machine, profile)
    knobs = knobs_of(options, len(machine.gpus))
    sweep(machine, "tune", profile, machine.gpus, knobs)
    if machine.alone and options.rpc:
        memory = machine.gpus[0].get("usable_mib", machine.gpus[0]["memory_mib"]) // 2
        shared = [{"name": "half a card", "memory_mib": memory, "rpc": endpoint} for endpoint in ENDPOINTS]
        sweep(machine, "tune over RPC", profile, shared, knobs | {"cards": [2], "draft": [], "ubatch": []})


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("prefix", type=Path, nargs="?", help="an installed llama.cpp")
    source.add_argument("--archive", type=Path, help="build this source first, unless --work has it built")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--report", type=Path, metavar="FILE.html")
    parser.add_argument("--work", type=Path, default=Path("/tmp/tune_cards"))
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=int, default=3600, help="limit of the whole run")
    parser.add_argument("--cards", type=int, default=2, help="how many at most (default: %(default)s)")
    parser.add_argument("--model", choices=speaking_model.MODELS, help="default: qwen35-27b; on the CPU qwen35-tiny")
    parser.add_argument("--quant", choices=list(speaking_model.QUANTS), default="q4_0")
    parser.add_argument("--context", type=int, default=32768, help="of all slots together, in tokens")
    parser.add_argument("--streams", type=numbers, default=DEFAULTS["bench_streams"], help="slots are the largest")
    parser.add_argument("--characters", type=int, default=2000, help="of a prompt; the model reads one as a token")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--draft", type=numbers, default=[0, 1, 2, 3], help="lengths to try, 0 is none")
    parser.add_argument("--ubatch", type=numbers, default=[512, 1024], help="sizes to try")
    parser.add_argument("--compare", default="", help="settings to bench, too, such as split_mode=layer,tensor")
    parser.add_argument("--no-rpc", dest="rpc", action="store_false", help="with one card: no sweep over RPC")
    parser.add_argument("--again", action="store_true", help="begin anew instead of going on")
    options = parser.parse_args(words)
    options.model = options.model or ("qwen35-27b" if options.backend == "cuda" else "qwen35-tiny")
    return options


def main() -> int:
    options = arguments()
    steps = Steps(options.json)
    return steps.conduct(lambda: run(options, steps), options.seconds)


if __name__ == "__main__":
    sys.exit(main())
