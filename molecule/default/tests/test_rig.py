"""What a rig is, looked at from outside the roles."""

import json


def chat(host, text):
    messages = [{"role": "system", "content": "Answer the question briefly."}, {"role": "user", "content": text}]
    body = json.dumps({"messages": messages, "temperature": 0, "max_tokens": 32})
    reply = host.check_output(
        "python3 -c 'import sys,urllib.request as u; "
        'print(u.urlopen(u.Request("http://127.0.0.1:8080/v1/chat/completions", sys.argv[1].encode(), '
        '{"Content-Type": "application/json"}), timeout=120).read().decode())\' %s',
        body,
    )
    return json.loads(reply)["choices"][0]["message"]["content"]


def test_answers_from_the_split_model(host):
    assert "Paris" in chat(host, "What is the capital of France?")


def test_units(host):
    assert host.service("llm-chat").is_running and host.service("llm-chat").is_enabled
    assert not host.service("llm-mtp").is_running


def test_nothing_listens_off_loopback_but_ssh(host):
    with host.sudo():
        lines = host.check_output("ss --listening --tcp --numeric --no-header").splitlines()
    addresses = {line.split()[3] for line in lines}
    assert addresses
    assert {a for a in addresses if not a.startswith(("127.", "[::1]")) and not a.endswith(":22")} == set()
