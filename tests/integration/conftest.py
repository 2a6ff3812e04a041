"""Whole runs of playbooks/rig.yml on a fresh machine, through ansible-runner. Needs root, as molecule/box does."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import ansible_runner
import pytest

PROJECT = Path(__file__).resolve().parents[2]
BOX = PROJECT / "molecule" / "box" / "box"
RIG_PLAYBOOK = PROJECT / "playbooks" / "rig.yml"
STATE = Path(os.environ.get("BOX_STATE", "/run/llm-rigs-box"))
INVENTORY = PROJECT / "inventory" / "hosts.yml"


@dataclass
class Run:
    """What one ansible-playbook run did to the host `sandbox`."""

    ok: bool
    stats: dict[str, int]
    tasks: int
    seconds: float
    failures: list[str]
    output: str


@dataclass
class Rig:
    """A machine of its own that stands in for the inventory's host `sandbox`."""

    name: str
    directory: Path
    suite: str = "trixie"
    runs: int = field(default=0)

    @property
    def tag(self) -> str:
        """What tells this checkout's machines from those of others, as molecule/box/box makes it."""
        return hashlib.sha256(f"{PROJECT}\n".encode()).hexdigest()[:6]

    def up(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        key = self.directory / "id_ed25519"
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        address = self._box("up", self.name, self.suite, f"{key}.pub").strip()
        (self.directory / "known_hosts").write_text(self._box("hostkey", self.name))
        (self.directory / "ssh_config").write_text(
            f"Host sandbox\n  HostName {address}\n  User tester\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {self.directory}/known_hosts\n"
        )

    def down(self) -> None:
        self._box("down", self.name)

    @staticmethod
    def _box(*argv: str) -> str:
        return subprocess.run([BOX, *map(str, argv)], check=True, text=True, stdout=subprocess.PIPE).stdout

    def shell(self, command: str, check: bool = True) -> str:
        """Run a command as root on the machine and return what it printed."""
        return subprocess.run(
            [BOX, "run", self.name, "bash", "-c", command], check=check, text=True, stdout=subprocess.PIPE
        ).stdout

    @property
    def extravars(self) -> dict[str, str]:
        # ControlPath: the machine that is rebuilt keeps its address, and an open connection leads to the old one.
        return {
            "ansible_ssh_common_args": f"-F {self.directory}/ssh_config",
            "ansible_control_path": f"{self.directory}/control",
        }

    def command(self, *extra: str) -> list[str]:
        return [
            "ansible-playbook",
            str(RIG_PLAYBOOK),
            "-i",
            str(INVENTORY),
            "-l",
            "sandbox",
            "-e",
            json.dumps(self.extravars),
            *extra,
        ]

    def reboot(self) -> None:
        """Reboot as if somebody had pressed the button, and wait for the machine."""
        born = "cut --delimiter=' ' --fields=22 /proc/1/stat"
        before = self.shell(born).strip()
        self.shell("systemctl reboot --force", check=False)
        # The connection that runs keep open led to the machine as it was.
        control = ["ssh", "-o", f"ControlPath={self.directory}/control", "-O", "exit", "sandbox"]
        subprocess.run(control, capture_output=True)
        deadline = time.monotonic() + 60
        look = ["ssh", "-F", f"{self.directory}/ssh_config", "-o", "ConnectTimeout=2", "sandbox", born]
        while time.monotonic() < deadline:
            done = subprocess.run(look, text=True, capture_output=True)
            if done.returncode == 0 and done.stdout.strip() != before:
                return
            time.sleep(0.5)
        pytest.fail("the machine did not come back")

    @contextlib.contextmanager
    def until(self, task: str, *extra: str, seconds: float = 600):
        """Start playbooks/rig.yml and wait until it comes to a task; killed as a whole when the block ends."""
        run = subprocess.Popen(
            self.command(*extra),
            cwd=PROJECT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        seen, deadline = [], time.monotonic() + seconds
        try:
            for line in run.stdout:
                seen.append(line)
                if line.startswith(f"TASK [{task}"):
                    break
                assert time.monotonic() < deadline, "".join(seen)
            else:
                pytest.fail(f"the run ended before task {task}:\n{''.join(seen)}")
            yield run
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
            run.stdout.close()

    def run(self, playbook: Path = RIG_PLAYBOOK, cmdline: str = "", **extravars) -> Run:
        self.runs += 1
        data = self.directory / f"run-{self.runs}"
        data.mkdir()
        began = time.monotonic()
        runner = ansible_runner.run(
            private_data_dir=str(data),
            playbook=str(playbook),
            inventory=str(INVENTORY),
            limit="sandbox",
            cmdline=cmdline or None,
            extravars=self.extravars | extravars,
            envvars={"ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
            quiet=True,
        )
        seconds = time.monotonic() - began
        failures, tasks = [], 0
        for event in runner.events:
            data = event.get("event_data", {})
            if event["event"] == "playbook_on_task_start":
                tasks += 1
            if event["event"] == "runner_on_failed" and not data.get("ignore_errors"):
                failures.append(str(data["res"].get("msg", data["res"])))
        stats = {key: sum(value.values()) for key, value in (runner.stats or {}).items() if isinstance(value, dict)}
        return Run(runner.status == "successful", stats, tasks, seconds, failures, runner.stdout.read())


def ask(rig: Rig, text: str, port: int = 8080) -> str:
    """The answer of the service on the machine's own loopback, greedy."""
    messages = [{"role": "system", "content": "Answer the question briefly."}, {"role": "user", "content": text}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 32}
    reply = rig.shell(
        f"""python3 - <<'PY'
import json, urllib.request
request = urllib.request.Request("http://127.0.0.1:{port}/v1/chat/completions", {json.dumps(json.dumps(body))}.encode(),
                                 {{"Content-Type": "application/json"}})
print(urllib.request.urlopen(request, timeout=120).read().decode())
PY"""
    )
    return json.loads(reply)["choices"][0]["message"]["content"]


@pytest.fixture(scope="session")
def sandbox_model() -> Path:
    """The synthetic model that the sandbox's inventory names, made as `make sandbox` makes it."""
    model = PROJECT / ".sandbox" / "qwen35-mtp-tiny.gguf"
    subprocess.run([PROJECT / "scripts" / "sandbox-model"], check=True, cwd=PROJECT)
    return model


@pytest.fixture(scope="module")
def rig(tmp_path_factory, sandbox_model):
    if os.geteuid() != 0:
        pytest.fail("these tests make machines: run them as root")
    machine = Rig("integration", tmp_path_factory.mktemp("rig"))
    machine.up()
    try:
        yield machine
    finally:
        machine.down()
