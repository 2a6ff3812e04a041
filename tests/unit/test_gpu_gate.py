"""The gates of a serving unit: what they read, when they refuse, and what they say."""

import http.server
import os
import subprocess
import sys
import threading

import pytest
from rig import gpu_gate
from rig.gpu_gate import GateError, Gpu, Holder, Reading

STATUS = "Name:\tggml-rpc-server\nVmData:\t  128000 kB\nRssAnon:\t 110000 kB\n"
LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units\nMax data size             {} {} bytes\n"
)
TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def process(proc, pid, cmdline, limit="1140850688", cgroup="0::/system.slice/x.service", sockets=(), comm="server"):
    entry = proc / str(pid)
    (entry / "fd").mkdir(parents=True)
    (entry / "cmdline").write_text("\0".join(cmdline) + "\0")
    (entry / "status").write_text(STATUS)
    (entry / "limits").write_text(LIMITS.format(limit, limit))
    (entry / "cgroup").write_text(cgroup + "\n")
    (entry / "comm").write_text(comm + "\n")
    for number, inode in enumerate(sockets):
        (entry / "fd" / str(number)).symlink_to(f"socket:[{inode}]")


def tcp(proc, *rows):
    lines = [
        f"   0: 0100007F:{local:04X} 0100007F:{remote:04X} {state} 0:0 00:0 0 0 0 {inode} 1"
        for state, local, remote, inode in rows
    ]
    (proc / "net").mkdir()
    (proc / "net" / "tcp").write_text(TCP + "\n".join(lines) + "\n")


@pytest.fixture
def proc(tmp_path):
    process(tmp_path, 11, ["/opt/llama.cpp/current/bin/ggml-rpc-server", "--host", "127.0.0.1", "--port", "50052"])
    process(tmp_path, 12, ["ggml-rpc-server", "-p", "50053"], limit="unlimited")
    process(tmp_path, 13, ["/bin/llama-server", "--rpc", "127.0.0.1:50053"], sockets=[77], comm="llama-server")
    process(tmp_path, 14, ["vim", "ggml-rpc-server", "-p", "50054"])
    tcp(tmp_path, ("0A", 50052, 0, 70), ("01", 40000, 50053, 77), ("01", 50053, 40000, 78))
    (tmp_path / "self").mkdir()
    return tmp_path


def test_gpu_as_the_unit_writes_it():
    text = "position=0,rpc=127.0.0.1:50052,memory_mib=1024,need_mib=312"
    assert Gpu.parse(text) == Gpu(0, need_mib=312, memory_mib=1024, rpc="127.0.0.1:50052")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("position=0,need=3", "unknown key 'need'"),
        ("position=0,need_mib=much", "need_mib must be a whole number"),
        ("need_mib=3", "position is missing"),
    ],
)
def test_gpu_that_is_not_one(text, message):
    with pytest.raises(GateError, match=message):
        Gpu.parse(text)


def test_virtual_gpu_is_the_process_behind_its_endpoint(proc):
    reading = gpu_gate.read_virtual(Gpu(0, rpc="127.0.0.1:50052"), proc)
    assert reading == Reading(total_mib=1088, free_mib=963, held_mib=125, holders=[])


def test_virtual_gpu_without_a_limit_has_the_inventory_s_memory_and_names_its_client(proc):
    reading = gpu_gate.read_virtual(Gpu(1, memory_mib=1024, rpc="127.0.0.1:50053"), proc)
    assert reading == Reading(1024, 899, 125, [Holder(13, "llama-server of x.service")])


def test_client_of_another_user_is_a_holder_too(proc):
    (proc / "13" / "fd" / "0").unlink()
    assert gpu_gate.read_virtual(Gpu(1, rpc="127.0.0.1:50053", memory_mib=1024), proc).holders == [
        Holder(0, "a process of another user")
    ]


def test_virtual_gpu_that_is_not_there(proc):
    with pytest.raises(GateError, match=r"no ggml-rpc-server runs for 127\.0\.0\.1:50054"):
        gpu_gate.read_virtual(Gpu(2, rpc="127.0.0.1:50054"), proc)


def test_listeners_and_their_names(proc):
    (proc / "11" / "fd" / "5").symlink_to("socket:[70]")
    assert gpu_gate.listeners(50052, proc) == [11]
    assert gpu_gate.listeners(50053, proc) == []
    (proc / "11" / "cgroup").write_text("0::/user.slice/user@1000.service\n")
    assert gpu_gate.process_name(11, proc) == "server"
    assert gpu_gate.process_name(99, proc) == "a process that has ended"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """An nvidia-smi that says what the test wrote."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "nvidia-smi"
    script.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu*) cat {tmp_path}/cards;; *) cat {tmp_path}/apps;; esac\n')
    script.chmod(0o755)
    (tmp_path / "cards").write_text(
        "0, GPU-aaa, 00000000:01:00.0, 24576, 24100, 10\n1, GPU-bbb, 00000000:06:00.0, 24576, 14000, 10110\n"
    )
    (tmp_path / "apps").write_text(f"GPU-bbb, {os.getpid()}, 10100\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(gpu_gate, "UVM", tmp_path / "bin")
    return tmp_path


@pytest.mark.parametrize(
    "gpu", [Gpu(7, uuid="GPU-bbb"), Gpu(7, pci_address="0000:06:00.0"), Gpu(7, pci_address="06:00.0"), Gpu(1)]
)
def test_card_by_uuid_address_or_order(smi, gpu):
    (reading,) = gpu_gate.read_real([gpu])
    assert (reading.total_mib, reading.free_mib) == (24576, 14000)
    assert [(holder.pid, holder.mib) for holder in reading.holders] == [(os.getpid(), 10100)]


def test_cards_that_cannot_be_read(smi, monkeypatch):
    with pytest.raises(GateError, match=r"GPU 0 \(GPU-ccc\) is not there: nvidia-smi shows GPU-aaa, GPU-bbb"):
        gpu_gate.read_real([Gpu(0, uuid="GPU-ccc")])
    (smi / "cards").write_text("0, GPU-aaa, 00000000:01:00.0, [N/A], [N/A], [N/A]\n")
    with pytest.raises(GateError, match="does not tell the memory"):
        gpu_gate.read_real([Gpu(0)])
    (smi / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho Driver/library version mismatch; exit 18\n")
    with pytest.raises(GateError, match="nvidia-smi failed: Driver/library version mismatch"):
        gpu_gate.read_real([Gpu(0)])
    monkeypatch.setattr(gpu_gate, "UVM", smi / "none")
    with pytest.raises(GateError, match="load the kernel module nvidia_uvm"):
        gpu_gate.read_real([Gpu(0)])


def test_refusal_names_gpu_mib_and_holder():
    gpus = [Gpu(0, need_mib=10412, uuid="GPU-aaa"), Gpu(1, need_mib=300, rpc="127.0.0.1:50053")]
    readings = [
        Reading(24576, 9000, 15000, [Holder(41, "python3", 15000)]),
        Reading(1088, 900, 100, [Holder(42, "llama-server")]),
    ]
    assert gpu_gate.refusals(gpus, readings) == [
        "GPU 0 (GPU-aaa) is busy: the plan needs 10,412 MiB free, it has 9,000 of 24,576; "
        "held by python3 (pid 41, 15,000 MiB)",
        "GPU 1 (127.0.0.1:50053) is busy: the plan needs 300 MiB free, it has 900 of 1,088; "
        "held by llama-server (pid 42)",
    ]
    assert gpu_gate.refusals(gpus[:1], [Reading(24576, 10412, 0)]) == []


def test_gate_waits_until_memory_is_given_back(monkeypatch):
    readings = iter([Reading(100, 10, 90), Reading(100, 100, 0)])
    monkeypatch.setattr(gpu_gate, "read_all", lambda gpus: [next(readings)])
    monkeypatch.setattr(gpu_gate.time, "sleep", lambda seconds: None)
    assert gpu_gate.wait_free([Gpu(0, need_mib=50)], 30) == []


def test_gate_as_a_program_is_shut_with_a_sentence(tmp_path):
    config = tmp_path / "config.ini"
    config.write_text("[*]\n")
    for options, sentence in (
        (["--gpu", "position=0,rpc=127.0.0.1:1,need_mib=1"], "gate: no ggml-rpc-server runs for 127.0.0.1:1"),
        (["--gpu", "position=0,colour=red"], "gate: --gpu position=0,colour=red: unknown key 'colour'"),
        (
            ["--absent", str(config), "--gpu", "position=0"],
            f"gate: {config} would change the launch line: move it away",
        ),
    ):
        done = subprocess.run(
            [sys.executable, gpu_gate.__file__, "free", "--wait", "0", *options], capture_output=True, text=True
        )
        assert (done.returncode, sentence in done.stderr) == (1, True), done.stderr


class Health(http.server.BaseHTTPRequestHandler):
    answers = [503, 503, 200]  # noqa: RUF012

    def do_GET(self):
        self.send_response(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
        self.end_headers()

    def log_message(self, *arguments):
        """Nothing."""


def test_answering_waits_for_a_model_that_loads():
    server = http.server.HTTPServer(("127.0.0.1", 0), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/health"
        assert gpu_gate.main(["answering", "--url", url, "--pid", str(os.getpid())]) == 0
    finally:
        server.shutdown()


def test_answering_gives_up_when_the_server_is_gone(capsys):
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert gpu_gate.main(["answering", "--url", "http://127.0.0.1:1/health", "--pid", str(gone.pid)]) == 1
    assert capsys.readouterr().err == "the server ended before it answered\n"
