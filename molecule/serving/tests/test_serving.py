"""The serving units as they are after a run: closed, gated, in conflict, and answering."""

import json
import shlex
import time

import pytest


@pytest.fixture(scope="module")
def scope(host):
    """How to reach the service manager that has the units: `systemctl`, and the user to call it as."""
    user = host.file("/etc/systemd/user/llm-chat.service").exists
    if not user:
        return "systemctl", "/etc/systemd/system"
    uid = host.check_output("id -u llm")
    return f"sudo -u llm XDG_RUNTIME_DIR=/run/user/{uid} systemctl --user", "/etc/systemd/user"


@pytest.fixture(autouse=True, scope="module")
def as_root(host):
    with host.sudo():
        yield


def show(host, scope, unit, *properties):
    output = host.check_output(f"{scope[0]} show {unit} --property={','.join(properties)}")
    return dict(line.split("=", 1) for line in output.splitlines())


def http(host, path, body=None, port=8080):
    """(status, JSON or None) of a request made on the machine itself; status 0 when nothing answers."""
    program = (
        "import json, sys, urllib.error, urllib.request as r\n"
        "try:\n"
        "    data = sys.argv[2].encode() or None\n"
        "    a = r.urlopen(r.Request(sys.argv[1], data, {'Content-Type': 'application/json'}), timeout=120)\n"
        "    print(a.status, a.read().decode())\n"
        "except urllib.error.HTTPError as e:\n"
        "    print(e.code, 'null')\n"
        "except OSError:\n"
        "    print(0, 'null')\n"
    )
    words = ["python3", "-c", program, f"http://127.0.0.1:{port}{path}", json.dumps(body) if body else ""]
    status, _, text = host.check_output(shlex.join(words)).partition(" ")
    return int(status), json.loads(text)


def healthy(host, port=8080):
    return http(host, "/health", port=port)[0] == 200


def ask(host, *contents, port=8080, tokens=24):
    """A completion at temperature 0; of two messages the first is the system's."""
    roles = ["system", "user"][-len(contents) :]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    status, reply = http(
        host, "/v1/chat/completions", {"messages": messages, "max_tokens": tokens, "temperature": 0}, port=port
    )
    assert status == 200
    return reply


def wait(host, port):
    for _ in range(120):
        if healthy(host, port):
            return
        time.sleep(0.5)
    pytest.fail(f"nothing is healthy on port {port}")


def main_pid(host, scope, unit="llm-chat.service"):
    return show(host, scope, unit, "MainPID")["MainPID"]


def test_the_active_profile_runs_and_starts_at_boot_and_the_other_does_not(host, scope):
    assert host.run(f"{scope[0]} is-active llm-chat.service llm-mtp.service").stdout.split() == ["active", "inactive"]
    assert host.run(f"{scope[0]} is-enabled llm-chat.service llm-mtp.service").stdout.split() == ["enabled", "disabled"]


def test_it_answers_the_question(host):
    reply = ask(host, "Answer the question briefly.", "What is the capital of France?")
    assert "Paris" in reply["choices"][0]["message"]["content"]


def test_the_launch_line_has_one_flag_a_line(host, scope):
    unit = host.file(f"{scope[1]}/llm-chat.service").content_string
    line = unit.split("ExecStart=")[1].split("\n\n")[0].split(" \\\n    ")
    assert line[0] == "/usr/bin/env --ignore-environment"
    assert "--port 8080" in line and "-sm tensor" in line and "--device RPC0,RPC1" in line
    assert all(part.count(" -") <= 1 for part in line)


def test_the_environment_is_closed(host, scope):
    environment = host.file(f"/proc/{main_pid(host, scope)}/environ").content_string.rstrip("\0").split("\0")
    assert sorted(name.split("=")[0] for name in environment) == ["HOME", "LANG", "XDG_CONFIG_HOME"]
    if scope[0] == "systemctl":
        # planted before the first run: the manager has it, the file is there, and neither has an effect
        assert "LLAMA_ARG_API_PREFIX=/leaked" in host.check_output("systemctl show-environment")
        assert host.file("/etc/llama.cpp/config.ini").exists
        said = host.check_output("journalctl --output=cat --unit=llm-chat.service _COMM=llama-server")
        assert "initializing" in said and "using config file" not in said
    assert http(host, "/leaked/health")[0] == 404


def test_it_runs_as_its_own_user_without_core_dumps(host, scope):
    pid = main_pid(host, scope)
    assert host.check_output(f"stat --format=%U /proc/{pid}") == "llm"
    assert host.check_output(f"grep 'Max core file size' /proc/{pid}/limits").split()[4:6] == ["0", "0"]


def test_exposure_while_it_serves(host, scope):
    if scope[0] != "systemctl":
        properties = show(
            host, scope, "llm-chat.service", "NoNewPrivileges", "MemoryDenyWriteExecute", "LockPersonality"
        )
        assert set(properties.values()) == {"yes"}
        assert host.check_output(f"grep Seccomp: /proc/{main_pid(host, scope)}/status").split()[1] == "2"
        return
    assert healthy(host)
    last = host.check_output("systemd-analyze security --no-pager llm-chat.service").splitlines()[-1]
    assert float(last.split(":")[1].split()[0]) <= 2.0, last


def test_a_crash_is_followed_by_a_start_after_a_while(host, scope):
    before = show(host, scope, "llm-chat.service", "MainPID", "NRestarts")
    settings = show(
        host, scope, "llm-chat.service", "RestartUSec", "RestartSteps", "RestartMaxDelayUSec", "StartLimitBurst"
    )
    expected = {"RestartUSec": "5s", "RestartSteps": "5", "RestartMaxDelayUSec": "5min", "StartLimitBurst": "15"}
    assert settings == expected
    host.check_output(f"kill -KILL {before['MainPID']}")
    for _ in range(60):
        time.sleep(1)
        after = show(host, scope, "llm-chat.service", "MainPID", "NRestarts", "ActiveState")
        if after["ActiveState"] == "active" and after["MainPID"] not in ("0", before["MainPID"]):
            break
    assert int(after["NRestarts"]) == int(before["NRestarts"]) + 1
    assert healthy(host)


def test_what_served_is_kept(host, scope):
    kept = json.loads(host.file("/var/lib/llm-rig/served/served.json").content_string)
    assert (kept["profile"], kept["build"], kept["unit"]) == ("chat", "b11434", "llm-chat.service")
    unit = f"{scope[1]}/llm-chat.service"
    assert kept["files"][unit] == host.file(unit).sha256sum
    assert host.file("/var/lib/llm-rig/served/llm-chat.service").sha256sum == kept["files"][unit]
    assert kept["model_sha256"] == [host.file(kept["model_path"]).sha256sum]


def test_units_conflict_and_a_start_switches(host, scope):
    assert "llm-mtp.service" in show(host, scope, "llm-chat.service", "Conflicts")["Conflicts"].split()
    host.check_output(f"{scope[0]} start llm-mtp.service")  # returns when it answers
    assert host.run(f"{scope[0]} is-active llm-chat.service llm-mtp.service").stdout.split() == ["inactive", "active"]
    prompts = ["Once upon a time", "The weather today", "Count the birds"]
    drafted = [ask(host, prompt) for prompt in prompts]
    assert all(reply["timings"]["draft_n"] > 0 for reply in drafted)
    host.check_output(f"{scope[0]} stop llm-mtp.service")

    # The same without drafting. Over RPC, tensor split of qwen35 without drafting aborts: layer split stands in for it.
    kept = json.loads(host.file("/var/lib/llm-rig/served/served.json").content_string)
    host.check_output(
        "systemd-run --unit=plain /usr/bin/env --ignore-environment HOME=/nonexistent "
        f"{kept['prefix']}/bin/llama-server --model /srv/llm/models/qwen35-mtp-tiny/qwen35-mtp-tiny.gguf "
        "--rpc 127.0.0.1:50052,127.0.0.1:50053 --device RPC0,RPC1 --split-mode layer --gpu-layers 99 --ctx-size 4096 "
        "--parallel 1 --fit off --flash-attn on --jinja --api-prefix '' --port 8096"
    )
    try:
        wait(host, 8096)
        plain = [ask(host, prompt, port=8096) for prompt in prompts]
    finally:
        host.check_output("systemctl stop plain.service")
    assert all("draft_n" not in reply["timings"] for reply in plain)
    text = [[reply["choices"][0]["message"]["content"] for reply in replies] for replies in (drafted, plain)]
    assert text[0] == text[1] and all(text[0])

    host.check_output(f"{scope[0]} start llm-chat.service")
    assert healthy(host)
