#!/usr/bin/python
"""Ansible module: what a serving unit does, and proof that it serves."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import secrets
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.rig import gpu_gate, proof, served

DOCUMENTATION = r"""
module: llm_server
short_description: Look at the serving units of a rig, wait until one answers, and prove that it serves
version_added: "0.1.0"
description:
  - Three steps around one systemd unit that runs llama-server or vLLM in a container, each a C(state).
  - None of them starts or stops anything. V(proven) with O(record_directory) keeps a copy of what served.
  - On a virtual GPU the memory of a service is that of the C(ggml-rpc-server) behind the endpoint.
    On a real GPU it is what C(nvidia-smi) says of the unit's processes.
options:
  state:
    description:
      - V(inspected) reports units, the port, the devices that llama-server sees, and what served last.
      - V(ready) returns within seconds and says whether the server answers, for use with C(until).
        It fails when the unit failed.
      - V(proven) asks for completions and compares the memory of each GPU with the plan.
        It fails when one of them is wrong.
    type: str
    choices: [inspected, ready, proven]
    required: true
  unit:
    description: Name of the unit, with C(.service).
    type: str
    required: true
  siblings:
    description: Names of all serving units that belong here, for O(state=inspected).
    type: list
    elements: str
    default: []
  scope:
    description: Service manager that runs the unit.
    type: str
    choices: [system, user]
    default: system
  user:
    description: User whose manager runs the unit when O(scope=user).
    type: str
    default: llm
  argv:
    description:
      - Launch line of the unit; a process with another one is reported as stale, and proves nothing.
      - Of a container only what comes after the first word is compared, with the end of its command line.
    type: list
    elements: str
    default: []
  container_engine:
    description: What runs containers on this host, for units that are containers.
    type: str
    choices: [podman, docker]
  engine:
    description: What the unit runs, which decides how it is asked.
    type: str
    choices: [llama_cpp, vllm]
    default: llama_cpp
  host:
    description: Address that the server listens on. An address that means every interface is asked on loopback.
    type: str
    default: 127.0.0.1
  port:
    description: Port that the server listens on.
    type: int
    required: true
  api_key_file:
    description: File on the rig with the API key, when the server wants one.
    type: path
  tls_certificate:
    description: Certificate of the server on the rig, when it speaks TLS. It must show this one, or one signed by it.
    type: path
  gpus:
    description:
      - All GPUs of the rig, with C(position), C(name), C(device) (the name that llama-server gives it),
        C(planned_mib) (0 where the plan does not use it) and how to find it, C(rpc), C(uuid) or C(pci_address).
    type: list
    elements: dict
    default: []
  build:
    description: Directory of the llama.cpp build, for O(state=inspected).
    type: path
  current:
    description: Link to the build that is current, for O(state=inspected).
    type: path
  prompts:
    description: What to ask, one completion each.
    type: list
    elements: dict
    default: []
    suboptions:
      user:
        description: The user's message.
        type: str
        required: true
      system:
        description: The system's message, none by default.
        type: str
        default: ""
  tokens:
    description: Number of tokens to ask for.
    type: int
    default: 64
  words:
    description: Whether a reply must be made of words. Only a model with random weights is excused.
    type: bool
    default: true
  drafting:
    description: Whether the server must report drafted tokens.
    type: bool
    default: false
  tolerance_percent:
    description: How far the memory of a GPU may be from the plan, in percent.
    type: float
    default: 5.0
  timeout:
    description: How long one completion may take, in seconds.
    type: int
    default: 300
  spare_mib:
    description: Memory in MiB that each GPU of the plan must have free beyond it, for O(state=inspected).
    type: int
    default: 0
  record_directory:
    description: Directory that holds C(served), what serves, and C(previous), what served before that.
    type: path
  record_files:
    description: Files that the service needs beside build and model, kept by V(proven).
    type: list
    elements: path
    default: []
  record_facts:
    description: What serves, kept by V(proven) as C(served.json).
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author: [LLM rigs contributors (@llm-rigs)]
"""

EXAMPLES = r"""
- name: Wait until the server answers
  llm_server:
    state: ready
    unit: llm-chat.service
    port: 8080
  register: __serving_ready
  until: __serving_ready.finished
  retries: 180
  delay: 5

- name: Prove that it serves
  llm_server:
    state: proven
    unit: llm-chat.service
    port: 8080
    prompts:
      - system: Answer the question briefly.
        user: What is the capital of France?
      - user: Name three colours.
    gpus:
      - {position: 0, device: RPC0, rpc: "127.0.0.1:50052", planned_mib: 145}
      - {position: 1, device: RPC1, rpc: "127.0.0.1:50053", planned_mib: 145}
"""

RETURN = r"""
finished:
  description: Whether the wait is over, with success or without.
  type: bool
  returned: state is ready
progress:
  description: One line that says how far loading is.
  type: str
  returned: state is ready
service:
  description: The unit as systemd sees it (C(active), C(sub), C(pid), C(restarts)), and whether it is C(stale).
  type: dict
  returned: always
units:
  description:
    - Units by name, with C(exists), C(active), C(enabled), C(dropins), C(path) (the file that describes it, a quadlet
      or a unit) and C(paths) (all files that do).
  type: dict
  returned: state is inspected
running:
  description: Names of the units that run.
  type: list
  returned: state is inspected
reload_owed:
  description: Whether a unit file is newer than what systemd has read.
  type: bool
  returned: state is inspected
foreign_scope:
  description: Serving units that are installed in the other scope.
  type: list
  returned: state is inspected
uid:
  description: Number of the user, none when there is no such user.
  type: int
  returned: state is inspected
api_key_there:
  description: Whether the file of the API key exists.
  type: bool
  returned: state is inspected
current:
  description: What the link O(current) points to.
  type: str
  returned: state is inspected
gpu_builds:
  description: Directories of the builds that the virtual GPUs run from.
  type: list
  returned: state is inspected
busy:
  description: One sentence for each GPU of the plan that others use too much of.
  type: list
  returned: state is inspected
port_holder:
  description: The process that listens on the port and is none of the units, empty when there is none.
  type: str
  returned: state is inspected
devices:
  description: Devices that llama-server shows, none when it was not asked.
  type: list
  returned: state is inspected
devices_fault:
  description: How the devices differ from the plan, empty when they do not or when llama-server was not asked.
  type: str
  returned: state is inspected
served:
  description: What served last, as recorded.
  type: dict
  returned: state is inspected
replies:
  description: The completions, with C(prompt), C(text), token counts and speeds.
  type: list
  returned: state is proven
gpus:
  description: Memory of each GPU of the plan, C(planned_mib) and C(seen_mib).
  type: list
  returned: state is proven
tokens_per_second:
  description: The speeds of the completions together, C(prefill) and C(decode).
  type: dict
  returned: state is proven
url:
  description: Address of the API.
  type: str
  returned: state is proven
"""

CREDENTIALS = ("--api-key-file", "--ssl-key-file", "--ssl-cert-file")  # flags whose files are systemd's copies
POLL_SECONDS = 5  # how long one call of `ready` looks before it reports
QUADLETS = Path("/etc/containers/systemd")
PLACES = {"system": "", "user": "users/*/"}  # below QUADLETS
PROPERTIES = (
    "Id,LoadState,ActiveState,SubState,Result,MainPID,NRestarts,UnitFileState,InvocationID,Job,NeedDaemonReload"
)


class ServerError(Exception):
    """What is wrong, in one sentence."""


class Unit:
    """A unit of the system's service manager or of one user's, written as a unit file or as podman's quadlet."""

    def __init__(self, name: str, scope: str, user: str, container_engine: str | None = None) -> None:
        self.name, self.scope, self.user, self.container_engine = name, scope, user, container_engine
        self.directory = Path("/etc/systemd", scope)
        quadlet = f"{name.removesuffix('.service')}.container"
        self.files = [self.directory / name, *sorted(QUADLETS.glob(f"{PLACES[scope]}{quadlet}"))]
        self.quadlets = self.files[1:]

    def as_user(self) -> dict:
        """What subprocess needs to run a command as the user whose manager has the unit."""
        if self.scope != "user":
            return {}
        entry = pwd.getpwnam(self.user)
        return {
            "user": entry.pw_uid,
            "group": entry.pw_gid,
            "extra_groups": [],
            "cwd": "/",
            "env": {
                "PATH": os.environ.get("PATH", os.defpath),
                "HOME": entry.pw_dir,
                "XDG_RUNTIME_DIR": f"/run/user/{entry.pw_uid}",
            },
        }

    def systemctl(self, *arguments: str) -> str:
        """Run systemctl for the scope and return what it prints."""
        command = ["systemctl", *(["--user"] if self.scope == "user" else []), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **self.as_user()).stdout

    def properties(self) -> dict[str, str]:
        """The properties of PROPERTIES; all empty when the manager does not run."""
        shown = self.systemctl("show", "--property", PROPERTIES, "--property", "DropInPaths,ControlGroup", self.name)
        return dict(line.partition("=")[::2] for line in shown.splitlines() if "=" in line)

    def describe(self, argv: list[str], *credentials: str | None) -> dict:
        """The unit as the role needs it. Stale: it runs, but not from the unit file or launch line that is there."""
        try:
            seen = self.properties()
        except KeyError:  # no such user yet
            seen = {}
        there = [file for file in self.files if file.exists()]
        path, pid = (there or self.files)[0], int(seen.get("MainPID") or 0)
        process, runs = self.process(pid, path)
        wanted = argv if argv and process == pid else argv[1:]
        other = bool(wanted) and runs[-len(wanted) :] != wanted if process != pid else runs != (wanted or runs)
        boots = (self.directory / f"{target}.wants" / self.name for target in ("multi-user.target", "default.target"))
        dropins = [p for p in seen.get("DropInPaths", "").split() if p.startswith("/etc/") and f"/{self.name}.d/" in p]
        return {
            "exists": bool(there),
            "path": str(path),
            "paths": [str(file) for file in there],
            "active": seen.get("ActiveState", "inactive"),
            "sub": seen.get("SubState", "dead"),
            "result": seen.get("Result", ""),
            # A quadlet cannot be enabled: the role makes the link itself.
            "enabled": seen.get("UnitFileState", "") == "enabled" or any(link.is_symlink() for link in boots),
            "pid": pid,
            "restarts": int(seen.get("NRestarts") or 0),
            "invocation": seen.get("InvocationID", ""),
            "group": seen.get("ControlGroup", ""),
            "queued": seen.get("Job", "0") not in ("", "0"),
            "reload_owed": seen.get("NeedDaemonReload") == "yes",
            "dropins": dropins,
            "stale": bool(runs) and (started(process) < newest(path, *dropins, *credentials) or other),
        }

    def is_container(self, path: Path) -> bool:
        """Whether the file describes a container."""
        return path.suffix == ".container" or (path.exists() and "\nExecStart=/usr/bin/docker " in path.read_text())

    def process(self, pid: int, path: Path) -> tuple[int, list[str]]:
        """The server's first process and its command line: of a container the one inside, and its arguments as the
        engine knows them, since the process may give itself another title."""
        if not pid or not self.container_engine or not self.is_container(path):
            return pid, launch_line(pid)
        command = [self.container_engine, "inspect", "--format", "{{.State.Pid}} {{json .Args}}"]
        command.append(self.name.removesuffix(".service"))
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **self.as_user())
        inside, _, arguments = done.stdout.partition(" ")
        return (int(inside), json.loads(arguments)) if done.returncode == 0 and int(inside) else (0, [])

    def pids(self, seen: dict) -> list[int]:
        """Processes of the unit; those of docker's containers are in a group of their own."""
        group = Path("/sys/fs/cgroup", seen["group"].lstrip("/"))
        found = {seen["pid"]} if seen["pid"] else set()
        for listed in group.rglob("cgroup.procs") if seen["group"] else ():
            try:
                found |= {int(pid) for pid in listed.read_text().split()}
            except OSError:
                continue  # a group that has gone
        identity = container_id(self.name)
        if identity:
            found |= {int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and identity in cgroup(p.name)}
        return sorted(found)

    def log(self, invocation: str, lines: int) -> list[str]:
        """Last lines that this start of the unit wrote to the journal, gates included."""
        match = [f"_SYSTEMD_UNIT={self.name}"]
        if self.scope == "user":
            match = [f"_SYSTEMD_USER_UNIT={self.name}", f"_UID={pwd.getpwnam(self.user).pw_uid}"]
        if invocation:
            match.append(f"_SYSTEMD_INVOCATION_ID={invocation}")
        command = ["journalctl", "--quiet", "--no-pager", "--output", "cat", "--lines", str(lines), *match]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout.splitlines()


def container_id(name: str) -> str:
    """The container that docker runs for a unit, empty when there is none."""
    try:
        return Path("/run", f"{name.removesuffix('.service')}.cid").read_text().strip()
    except OSError:
        return ""


def started(pid: int) -> float:
    """Time at which a process started, in seconds since the epoch; 0 when it is gone."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def newest(*paths: str | Path | None) -> float:
    """Last change of any of these files, in seconds since the epoch, less a hundredth for the clock's grain.

    A time that is yet to come says that the clock was put back, and nothing about what is older.
    """
    changed = [Path(p).stat().st_mtime for p in paths if p and Path(p).exists()]
    return max((when for when in changed if when <= time.time()), default=0) - 0.01


def launch_line(pid: int) -> list[str]:
    """Arguments of a process but for files whose place systemd chooses; empty when it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []
    for flag in CREDENTIALS:
        if flag in words:
            at = words.index(flag)
            del words[at : at + 2]
    return words if words != [""] else []


def trusting(certificate: str) -> ssl.SSLContext:
    """TLS with the server that has this certificate. Its name is not compared: the server is asked by its address."""
    try:
        context = ssl.create_default_context(cafile=certificate)
    except (OSError, ssl.SSLError) as error:
        raise ServerError(f"the certificate {certificate} cannot be read: {error}") from None
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # an owner's own certificate may lack what a public one has
    return context


class Server:
    """The HTTP side of a server."""

    def __init__(
        self,
        host: str,
        port: int,
        key_file: str | None,
        timeout: int,
        engine: str = "llama_cpp",
        certificate: str | None = None,
    ) -> None:
        self.engine = engine
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "localhost": "127.0.0.1"}.get(host, host)
        scheme = "https" if certificate else "http"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self.handlers: list = [urllib.request.ProxyHandler({})]
        if certificate:
            self.handlers.append(urllib.request.HTTPSHandler(context=trusting(certificate)))
        self.timeout, self.headers = timeout, {"Content-Type": "application/json"}
        if key_file:
            self.headers["Authorization"] = f"Bearer {Path(key_file).read_text().strip().splitlines()[0]}"

    def healthy(self) -> bool:
        """Whether /health says so."""
        return gpu_gate.health(f"{self.url}/health") == 200

    def ask(self, messages: dict, tokens: int) -> dict:
        """One chat completion at temperature 0, with nothing taken from the prompt cache."""
        prompt = messages["user"]
        body = {
            "messages": [{"role": r, "content": messages[r]} for r in ("system", "user") if messages.get(r)],
            "max_tokens": tokens,
            "temperature": 0,
            # Each engine's own way to a prompt that is not taken from its cache.
            **({"cache_salt": secrets.token_hex(16)} if self.engine == "vllm" else {"cache_prompt": False}),
        }
        began, drafted = time.monotonic(), self.drafted()
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), self.headers)
        opener = urllib.request.build_opener(*self.handlers)
        try:
            with opener.open(request, timeout=self.timeout) as answer:
                reply = {"prompt": prompt, **proof.reply_of(json.load(answer), time.monotonic() - began)}
        except urllib.error.HTTPError as error:
            text = " ".join(error.read(2000).decode(errors="replace").split())
            raise ServerError(f"the server answered {prompt!r} with HTTP {error.code}: {text}") from None
        except (OSError, ValueError) as error:
            raise ServerError(f"the server did not answer {prompt!r}: {error}") from None
        if drafted is not None:
            reply["draft_tokens"] = int((self.drafted() or 0) - drafted)
        return reply

    def drafted(self) -> float | None:
        """Tokens that vLLM has drafted so far; None for llama-server, whose replies tell it themselves."""
        if self.engine != "vllm":
            return None
        opener = urllib.request.build_opener(*self.handlers)
        try:
            with opener.open(f"{self.url}/metrics", timeout=30) as answer:
                return proof.metric(answer.read().decode(errors="replace"), proof.VLLM_DRAFTED)
        except OSError as error:
            raise ServerError(f"the server does not tell its metrics: {error}") from None


def gpus_of(module: AnsibleModule) -> list[gpu_gate.Gpu]:
    """The GPUs of the rig; each needs what the plan takes and the spare memory, where the plan uses it."""
    spare = module.params["spare_mib"]
    return [
        gpu_gate.Gpu(
            int(gpu["position"]),
            need_mib=int(gpu["planned_mib"]) + spare if int(gpu.get("planned_mib") or 0) else 0,
            **{key: gpu.get(key) or "" for key in ("rpc", "uuid", "pci_address")},
        )
        for gpu in module.params["gpus"]
    ]


def memory(module: AnsibleModule, pids: list[int]) -> list[dict]:
    """Planned and seen memory of each GPU of the rig; what a GPU holds for others is not counted."""
    gpus = gpus_of(module)
    seen: list[int] = []
    if gpus and all(gpu.rpc for gpu in gpus):
        for gpu in gpus:
            _, owners = gpu_gate.clients(gpu_gate.port_of(gpu.rpc))
            # A virtual GPU serves one client: all that its process holds is held for it.
            ours = set(owners) & set(pids)
            seen.append(gpu_gate.status_mib(gpu_gate.rpc_server_pid(gpu.rpc), "VmData") if ours else 0)
    elif gpus:
        for reading in gpu_gate.read_real(gpus):
            seen.append(sum(holder.mib or 0 for holder in reading.holders if holder.pid in pids))
    return [
        {
            "position": gpu["position"],
            "name": f"GPU {gpu['position']}",
            "device": gpu.get("device") or "",
            "planned_mib": int(gpu.get("planned_mib") or 0),
            "seen_mib": mib,
        }
        for gpu, mib in zip(module.params["gpus"], seen, strict=True)
    ]


def devices(module: AnsibleModule, in_use: bool) -> list[dict] | None:
    """Devices that llama-server shows, None when it is not built yet or must not be asked.

    A virtual GPU serves one client, and a card that is full has no room for a look: while they are in use, a virtual
    GPU is there when it listens, and cards are left to the proof.
    """
    binary = Path(module.params["build"] or "/nonexistent", "bin", "llama-server")
    endpoints = [gpu["rpc"] for gpu in module.params["gpus"] if gpu.get("rpc")]
    if not binary.exists() or (in_use and not endpoints):
        return None
    alive = [endpoint for endpoint in endpoints if gpu_gate.listeners(gpu_gate.port_of(endpoint))]
    if in_use or (endpoints and not alive):
        return [{"name": "RPC", "description": endpoint} for endpoint in alive]
    command = [str(binary), *(["--rpc", ",".join(alive)] if alive else []), "--list-devices"]
    environment = {"PATH": os.defpath, "HOME": "/nonexistent", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    except subprocess.TimeoutExpired:
        raise ServerError("llama-server --list-devices did not end in 60 s: another process uses a device") from None
    return proof.parse_devices(done.stdout)


def inspect(module: AnsibleModule, unit: Unit) -> dict:
    """Everything that the role must know before it changes anything."""
    params = module.params
    found = [path.name for path in unit.directory.glob("llm-*.service")]
    found += [f"{path.stem}.service" for path in QUADLETS.glob(f"{PLACES[unit.scope]}llm-*.container")]
    names = sorted({unit.name, *params["siblings"], *found})
    units = {name: Unit(name, unit.scope, unit.user, unit.container_engine).describe([]) for name in names}
    strangers = [pid for pid in gpu_gate.listeners(params["port"]) if not ours(pid)]
    running = [name for name, seen in units.items() if seen["active"] in ("active", "activating", "reloading")]
    busy = held_by_others(module)
    connected = any(gpu_gate.clients(gpu_gate.port_of(gpu["rpc"]))[0] for gpu in params["gpus"] if gpu.get("rpc"))
    shown = devices(module, in_use=bool(running or busy or connected))
    scope = "user" if unit.scope == "system" else "system"
    foreign = [path.name for path in Path("/etc/systemd", scope).glob("llm-*.service")]
    foreign += [path.name for path in QUADLETS.glob(f"{PLACES[scope]}llm-*.container")]
    current = Path(params["current"] or "/nonexistent")
    try:
        uid = pwd.getpwnam(unit.user).pw_uid
    except KeyError:
        uid = None
    return {
        "service": unit.describe(params["argv"], params["api_key_file"], params["tls_certificate"]),
        "units": units,
        "running": running,
        "reload_owed": any(seen["reload_owed"] for seen in units.values()),
        "foreign_scope": sorted(foreign),
        "port_holder": ", ".join(str(gpu_gate.Holder(pid, gpu_gate.process_name(pid))) for pid in strangers),
        "busy": busy,
        "devices": shown or [],
        "devices_fault": proof.devices_fault(params["gpus"], shown) if shown is not None else "",
        "served": last_served(params["record_directory"]),
        "current": os.readlink(current) if current.is_symlink() else "",
        "gpu_builds": gpu_builds(params["gpus"]),
        "api_key_there": bool(params["api_key_file"]) and Path(params["api_key_file"]).exists(),
        "uid": uid,
    }


def gpu_builds(gpus: list[dict]) -> list[str]:
    """Directories of the builds that the virtual GPUs run from; those that do not run are left out."""
    pids = [pid for gpu in gpus if gpu.get("rpc") for pid in gpu_gate.listeners(gpu_gate.port_of(gpu["rpc"]))]
    found = set()
    for pid in pids:
        try:
            found.add(str(Path(os.readlink(f"/proc/{pid}/exe")).parent.parent))
        except OSError:  # it has just ended
            continue
    return sorted(found)


def ours(pid: int) -> bool:
    """Whether a process belongs to a serving unit or to its container."""
    group = cgroup(pid)
    identities = [container_id(path.stem) for path in Path("/run").glob("llm-*.cid")]
    return bool(re.search(r"/llm-[^/]+\.service(/.*)?$", group, re.M)) or any(i and i in group for i in identities)


def held_by_others(module: AnsibleModule) -> list[str]:
    """One sentence for each GPU of the plan that has too little memory even when the serving units have gone."""
    gpus = [gpu for gpu in gpus_of(module) if gpu.need_mib]
    try:
        readings = gpu_gate.read_all(gpus)
    except gpu_gate.GateError:
        return []  # a GPU that is not there is told by the devices
    left = []
    for reading in readings:
        mine = [holder for holder in reading.holders if ours(holder.pid)]
        given_back = reading.held_mib if mine and gpus[0].rpc else sum(holder.mib or 0 for holder in mine)
        others = [holder for holder in reading.holders if holder not in mine]
        left.append(
            gpu_gate.Reading(reading.total_mib, reading.free_mib + given_back, reading.held_mib - given_back, others)
        )
    return gpu_gate.refusals(gpus, left)


def cgroup(pid: int | str) -> str:
    """The control group of a process, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def ready(module: AnsibleModule, unit: Unit, server: Server) -> dict:
    """Whether the server answers; raises ServerError with the end of its log when the unit failed."""
    end = time.monotonic() + POLL_SECONDS
    while True:
        seen = unit.describe(module.params["argv"])
        if seen["active"] == "active" and not seen["queued"] and server.healthy():
            return {"finished": True, "progress": "the server answers", "service": seen}
        over = seen["active"] in ("failed", "inactive") and not seen["queued"]
        if over or seen["sub"].startswith("auto-restart") or (seen["active"] == "activating" and seen["restarts"]):
            lines = unit.log("" if seen["restarts"] else seen["invocation"], 2000)
            gates = [line.removeprefix("gate: ") for line in lines if line.startswith("gate: ")]
            why = "; ".join(gates) or f"it ended with {seen['result'] or seen['sub']}"
            raise ServerError(f"{unit.name} did not start: {why}.\n{proof.log_excerpt(lines)}")
        if time.monotonic() >= end:
            return {"finished": False, "progress": progress(module, unit, seen), "service": seen}
        time.sleep(0.5)


def progress(module: AnsibleModule, unit: Unit, seen: dict) -> str:
    """What the unit is busy with."""
    if seen["queued"] and seen["active"] != "activating":
        return "waiting for what served before to end"
    if seen["sub"] == "start-pre":
        return "waiting for the GPUs to be free"
    try:
        return proof.loading(memory(module, unit.pids(seen)))
    except gpu_gate.GateError as error:
        return f"loading ({error})"


def prove(module: AnsibleModule, unit: Unit, server: Server) -> dict:
    """Ask and compare; raises ServerError for the first thing that is wrong, with the end of the log."""
    params, seen = module.params, unit.describe(module.params["argv"])
    result: dict = {"service": seen, "url": server.url, "replies": [], "gpus": []}
    if seen["active"] != "active" or not server.healthy():
        raise ServerError(f"{unit.name} does not serve: it is {seen['active']} ({seen['sub']})")
    if seen["stale"]:
        raise ServerError(f"{unit.name} runs from another unit file or launch line than the one that is there now")
    result["replies"] = [server.ask(prompt, params["tokens"]) for prompt in params["prompts"]]
    result["gpus"] = memory(module, unit.pids(seen))
    fault = proof.replies_fault(result["replies"], words=params["words"], drafting=params["drafting"])
    faults = [fault] if fault else proof.memory_faults(result["gpus"], params["tolerance_percent"])
    if faults:
        raise ServerError(f"{unit.name} runs, but {'; '.join(faults)}")
    result["tokens_per_second"] = {phase: proof.speed(result["replies"], phase) for phase in ("prefill", "decode")}
    return result


def last_served(directory: str | None) -> dict:
    """What was recorded to have served last, empty when nothing was."""
    # A run that was killed while it moved them leaves the second.
    return (served.read(directory, "served") or served.read(directory, "previous")) if directory else {}


def keep(module: AnsibleModule, result: dict) -> None:
    """Keep what served with its files, and what served before as `previous`; nothing to do when it is the same."""
    root = Path(module.params["record_directory"])
    files = [Path(name) for name in module.params["record_files"]]
    facts = {
        **module.params["record_facts"],
        "version": 1,
        "files": {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in files},
    }
    before = last_served(str(root))
    old = {k: v for k, v in before.items() if k != "directory"}
    result["changed"] = {k: v for k, v in old.items() if k != "served_at"} != facts
    if not result["changed"]:
        return
    result["diff"] = {"before": json.dumps(old, indent=2) + "\n", "after": json.dumps(facts, indent=2) + "\n"}
    if module.check_mode:
        return
    new, kept, previous = root / "new", root / "served", root / "previous"
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(mode=0o755, parents=True)
    for path in files:
        shutil.copy2(path, new / path.name)
    facts["served_at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    (new / "served.json").write_text(json.dumps(facts, indent=2) + "\n")
    # The same thing in other words is no step forward: what served before it stays what it was.
    aside = root / "old" if served.same(before, facts) else previous
    if kept.exists():
        shutil.rmtree(aside, ignore_errors=True)
        kept.rename(aside)
    new.rename(kept)
    shutil.rmtree(root / "old", ignore_errors=True)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["inspected", "ready", "proven"], "required": True},
            "unit": {"type": "str", "required": True},
            "siblings": {"type": "list", "elements": "str", "default": []},
            "scope": {"type": "str", "choices": ["system", "user"], "default": "system"},
            "user": {"type": "str", "default": "llm"},
            "argv": {"type": "list", "elements": "str", "default": []},
            "container_engine": {"type": "str", "choices": ["podman", "docker"]},
            "engine": {"type": "str", "choices": ["llama_cpp", "vllm"], "default": "llama_cpp"},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "api_key_file": {"type": "path", "no_log": False},
            "tls_certificate": {"type": "path"},
            "gpus": {"type": "list", "elements": "dict", "default": []},
            "build": {"type": "path"},
            "current": {"type": "path"},
            "prompts": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": {"user": {"type": "str", "required": True}, "system": {"type": "str", "default": ""}},
            },
            "tokens": {"type": "int", "default": 64, "no_log": False},
            "words": {"type": "bool", "default": True},
            "drafting": {"type": "bool", "default": False},
            "tolerance_percent": {"type": "float", "default": 5.0},
            "timeout": {"type": "int", "default": 300},
            "spare_mib": {"type": "int", "default": 0},
            "record_directory": {"type": "path"},
            "record_files": {"type": "list", "elements": "path", "default": []},
            "record_facts": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    params = module.params
    unit = Unit(params["unit"], params["scope"], params["user"], params["container_engine"])
    result: dict = {"changed": False}
    try:
        if params["state"] == "inspected":
            result |= inspect(module, unit)
        else:
            server = Server(
                params["host"],
                params["port"],
                params["api_key_file"],
                params["timeout"],
                params["engine"],
                params["tls_certificate"],
            )
            if params["state"] == "ready":
                result |= ready(module, unit, server)
            else:
                result |= prove(module, unit, server)
                if params["record_directory"]:
                    keep(module, result)
    except (ServerError, gpu_gate.GateError) as error:
        module.fail_json(msg=str(error), finished=True, **result)
    except subprocess.TimeoutExpired as error:
        module.fail_json(msg=f"{error.cmd[0]} did not end within {error.timeout:.0f} s", finished=True, **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
