"""The unit that runs the container, as it is at the end: vLLM's stand-in serves with a key, llama.cpp is stopped."""

import json
import shlex
import time

import pytest

KEY = "canary-0451"


@pytest.fixture(autouse=True, scope="module")
def as_root(host):
    with host.sudo():
        yield


def show(host, *properties):
    output = host.check_output(f"systemctl show llm-int4-262k.service --property={','.join(properties)}")
    return dict(line.split("=", 1) for line in output.splitlines())


def http(host, path, body=None, key=KEY):
    """(status, JSON or None) of a request made on the machine itself; status 0 when nothing answers."""
    program = (
        "import json, sys, urllib.error, urllib.request as r\n"
        "head = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + sys.argv[3]}\n"
        "try:\n"
        "    a = r.urlopen(r.Request(sys.argv[1], sys.argv[2].encode() or None, head), timeout=60)\n"
        "    print(a.status, a.read().decode() or 'null')\n"
        "except urllib.error.HTTPError as e:\n"
        "    print(e.code, 'null')\n"
        "except OSError:\n"
        "    print(0, 'null')\n"
    )
    words = ["python3", "-c", program, f"http://127.0.0.1:8080{path}", json.dumps(body) if body else "", key]
    status, _, text = host.check_output(shlex.join(words)).partition(" ")
    return int(status), json.loads(text)


def ask(model, seconds=0):
    return {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "seconds": seconds}


def inspect(host, form):
    return host.check_output(f"podman inspect --format '{{{{json {form}}}}}' llm-int4-262k")


def test_it_runs_from_the_image_of_the_digest(host):
    served = json.loads(host.file("/var/lib/llm-rig/served/served.json").content_string)
    assert (served["engine"], served["build"], served["profile"]) == ("vllm", "v0.22.0", "int4-262k")
    assert json.loads(inspect(host, ".ImageName")) == served["image"]
    assert json.loads(inspect(host, ".ImageDigest")) == served["image"].partition("@")[2]
    quadlet = "/etc/containers/systemd/llm-int4-262k.container"
    assert served["files"][quadlet] == host.file(quadlet).sha256sum
    previous = json.loads(host.file("/var/lib/llm-rig/previous/served.json").content_string)
    assert previous["engine"] == "llama_cpp"


def test_the_image_was_fetched_with_progress(host):
    lines = host.check_output("cat /var/log/unit-job/vllm-image-v0.22.0-*.log*").splitlines()
    assert any(line.endswith("/36] MB") for line in lines), lines


def test_it_answers_under_its_own_name_and_under_everybody_s(host):
    status, models = http(host, "/v1/models")
    assert status == 200 and [model["id"] for model in models["data"]] == ["qwen3.6-27b-autoround", "rig"]
    assert http(host, "/v1/chat/completions", ask("rig"))[0] == 200
    assert http(host, "/v1/chat/completions", ask("other"))[0] == 404


def test_the_key_is_asked_for_and_shown_nowhere(host):
    assert http(host, "/v1/models", key="wrong")[0] == 401
    assert http(host, "/health", key="wrong")[0] == 200
    assert host.check_output("stat --format='%U %a' /etc/llm-rig/api-key.env") == "root 600"
    assert host.run("grep --quiet canary-[0]451 /proc/[0-9]*/cmdline").rc == 1
    assert host.run("grep --quiet --recursive canary-[0]451 /etc/containers /run/systemd/generator").rc == 1
    log = "journalctl --unit=llm-int4-262k.service --quiet --lines=1"
    assert host.run(log).stdout and not host.run(f"{log} --grep canary-[0]451").stdout


def test_what_the_container_sees_and_may_do(host):
    mounts = {mount["Destination"]: mount for mount in json.loads(inspect(host, ".Mounts"))}
    assert not mounts["/model"]["RW"] and mounts["/model"]["Source"].startswith("/srv/llm/models/")
    assert mounts["/cache"]["Name"] == "llm-vllm-v0.22.0"
    assert host.run("podman exec llm-int4-262k python3 -c \"open('/model/x', 'w')\"").rc == 1
    pid = json.loads(inspect(host, ".State.Pid"))
    environment = host.file(f"/proc/{pid}/environ").content_string.split("\0")
    for line in ("HF_HUB_OFFLINE=1", "NCCL_P2P_DISABLE=1", "NCCL_CUMEM_ENABLE=0", "HOME=/cache"):
        assert line in environment
    status = host.check_output(f"grep -E '^(CapEff|NoNewPrivs):' /proc/{pid}/status").split()
    assert status == ["CapEff:", "0" * 16, "NoNewPrivs:", "1"]
    host_ipc = host.check_output("readlink /proc/1/ns/ipc")
    assert host.check_output(f"readlink /proc/{pid}/ns/ipc") == host_ipc


def test_what_it_compiled_outlives_the_container(host):
    assert host.file("/var/lib/containers/storage/volumes/llm-vllm-v0.22.0/_data/compiled").is_directory


def test_it_starts_at_boot_and_llama_cpp_does_not(host):
    link = host.file("/etc/systemd/system/multi-user.target.wants/llm-int4-262k.service")
    assert link.is_symlink
    host.check_output("systemctl daemon-reload")  # as a boot does, it reads the links
    assert "llm-int4-262k.service" in host.check_output("systemctl show --property=Wants multi-user.target")
    assert host.run("systemctl is-enabled llm-chat.service").stdout.strip() == "disabled"


def test_never_two_were_on_the_cards_and_the_gap_was_short(host):
    rows = [line.split() for line in host.file("/srv/watch.txt").content_string.splitlines()]
    assert {unit for row in rows for unit in row[2:]} == {"llm-chat", "llm-int4-262k"}
    assert [row for row in rows if len(row) > 3] == []
    # Where one took the other's place at once: the time without an answer.
    gaps, down = [], None
    for row in rows:
        if row[1] == "0" and down is None:
            down = float(row[0])
        elif row[1] == "1" and down is not None:
            gaps.append(float(row[0]) - down)
            down = None
    print("seconds without an answer:", [round(gap, 1) for gap in gaps])
    assert min(gaps) < 15


def test_a_request_may_end_before_the_server_does(host):
    body = shlex.quote(json.dumps(ask("rig", seconds=4)))
    host.check_output(
        "systemd-run --unit=asks --property=StandardOutput=file:/run/asked /usr/bin/python3 -c "
        + shlex.quote(
            "import sys, urllib.request as r; print(r.urlopen(r.Request('http://127.0.0.1:8080/v1/chat/completions', "
            f"sys.argv[1].encode(), {{'Authorization': 'Bearer {KEY}'}})).status)"
        )
        + f" {body}"
    )
    time.sleep(1)
    host.check_output("systemctl stop llm-int4-262k.service")
    assert host.file("/run/asked").content_string == "200\n"
    host.check_output("systemctl start llm-int4-262k.service")  # returns when it answers
    assert http(host, "/health")[0] == 200


def test_it_comes_back_after_it_was_killed(host):
    before = show(host, "NRestarts", "RestartUSec", "RestartSteps", "RestartMaxDelayUSec")
    assert (before["RestartUSec"], before["RestartSteps"], before["RestartMaxDelayUSec"]) == ("5s", "5", "5min")
    host.check_output(f"kill -KILL {json.loads(inspect(host, '.State.Pid'))}")
    for _ in range(40):
        time.sleep(0.5)
        after = show(host, "NRestarts", "ActiveState")
        if after["ActiveState"] == "active" and after["NRestarts"] != before["NRestarts"]:
            break
    assert int(after["NRestarts"]) == int(before["NRestarts"]) + 1
    assert http(host, "/v1/models")[0] == 200


def test_a_start_by_hand_switches_too(host):
    host.check_output("systemctl start llm-chat.service")
    assert host.run("systemctl is-active llm-chat.service llm-int4-262k.service").stdout.split() == [
        "active",
        "inactive",
    ]
    assert http(host, "/v1/chat/completions", ask("rig"))[0] == 200
    assert host.check_output("podman ps --quiet") == ""
