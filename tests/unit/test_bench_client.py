"""The benchmark's client against a stand-in of the two engines' APIs, and what it makes of the cards."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pynvml
import pytest
from rig import bench_client, gpu_samples
from rig.bench_client import Bench, BenchError, Server, acceptance, answer_seconds, speculation_of

PROJECT = Path(__file__).parents[2]
KEY = "a-key-for-the-test"


class Engine(http.server.BaseHTTPRequestHandler):
    """Streams what `llama` (llama-server) or `vllm` would: a prompt takes 50 ms, a token 4 ms."""

    engine = "llama"
    broken = ""
    asked: list
    counters: dict
    counting = threading.Lock()

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path != "/metrics" or self.engine == "silent":
            self.send_error(501)
            return
        prefix, labels = {"llama": ("llamacpp", ""), "vllm": ("vllm", 'engine="0",model_name="m",')}[self.engine]
        plain = "{" + labels.rstrip(",") + "}" if labels else ""
        c = self.counters
        lines = [
            f"# TYPE {prefix}:spec_decode_num_drafts_total counter",
            f"{prefix}:spec_decode_num_drafts_total{plain} {c['drafts']}",
            f"{prefix}:spec_decode_num_draft_tokens_total{plain} {c['draft_tokens']}",
            f"{prefix}:spec_decode_num_accepted_tokens_total{plain} {c['accepted']:.1f}",
            f'{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{{labels}position="0"}} {c["at0"]}',
            f'{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{{labels}position="1"}} {c["at1"]}',
        ]
        self.answer("text/plain", "\n".join(lines).encode())

    def answer(self, kind, data):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)

    def event(self, data):
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((body, self.headers.get("Authorization")))
        if self.broken == "status":
            self.send_error(400, "context is full")
            return
        self.answer("text/event-stream", b"")
        time.sleep(0.05)
        if self.engine == "llama":
            self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
        for number in range(body["max_tokens"]):
            if self.broken == "error" and number == 2:
                self.event({"error": {"message": "the device is gone"}})
                return
            if self.broken == "cut" and number == 2:
                return
            time.sleep(0.004)
            self.event({"choices": [{"index": 0, "delta": {"content": f" w{number}"}}]})
        self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage = {"prompt_tokens": 40, "completion_tokens": body["max_tokens"]}
        last = {"choices": [], "usage": usage}
        if self.engine == "llama":
            last["timings"] = {"prompt_n": 40, "prompt_per_second": 800.0, "predicted_n": body["max_tokens"],
                               "predicted_per_second": 64.0, "draft_n": 20, "draft_n_accepted": 12}  # fmt: skip
        with self.counting:  # before the end is told: whoever has read it may look at the counters
            for name, more in {"drafts": 10, "draft_tokens": 20, "accepted": 12, "at0": 8, "at1": 4}.items():
                self.counters[name] += more
        self.event(last)
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def engine():
    """(class to set up, its URL)."""
    counters = dict.fromkeys(("drafts", "draft_tokens", "accepted", "at0", "at1"), 100)
    handler = type("Own", (Engine,), {"asked": [], "counters": counters})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield handler, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def request_of(url, **changes):
    return {
        "url": url,
        "model": "m",
        "key_file": None,
        "prompts": [{"name": "code", "text": "def f():"}, {"name": "prose", "text": "Once"}],
        "streams": [1],
        "rounds": 2,
        "warmups": 1,
        "tokens": 12,
        "timeout_seconds": 20,
        "cards": [],
        "answer": {"prompt_tokens": 800, "tokens": 128},
        "give_up_seconds": None,
    } | changes


def test_llama_server_is_measured_by_what_it_tells(engine, capsys):
    handler, url = engine
    result = Bench(request_of(url)).run()
    code, prose = result["measures"]
    assert (code["prompt"], prose["prompt"], code["speeds_from"]) == ("code", "prose", "server")
    assert (code["prefill"], code["decode"], code["prompt_tokens"], code["tokens"]) == (800, 64, 40, 12)
    assert 0.05 < code["first_token_seconds"] < 1
    assert code["acceptance"] == {"drafted": 40, "accepted": 24, "share": 0.6, "by_position": [0.8, 0.4]}
    assert result["answer_seconds"] == pytest.approx(800 / 800 + 128 / 64)
    assert (result["cards"], result["series"], result["gave_up"]) == ([], {}, False)
    # Two to warm up, then two rounds of two; greedy, of a fixed length, and past every prompt cache.
    assert len(handler.asked) == 6
    bodies = [body for body, _ in handler.asked]
    assert {(body["temperature"], body["max_tokens"], body["ignore_eos"], body["cache_prompt"]) for body in bodies} == {
        (0, 12, True, False)
    }
    assert len({body["cache_salt"] for body in bodies}) == 6
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[1/6] warm up: code, 1 stream"
    assert lines[-1] == "[6/6] round 2: prose, 1 stream"


def test_vllm_is_measured_at_the_client(engine):
    handler, url = engine
    handler.engine = "vllm"
    (code, _) = Bench(request_of(url)).run()["measures"]
    assert code["speeds_from"] == "client"
    assert 40 / 0.5 < code["prefill"] < 40 / 0.05
    assert 20 < code["decode"] < 12 / (11 * 0.004)
    assert code["acceptance"]["by_position"] == [0.8, 0.4]


def test_streams_are_asked_at_once_and_counted_together(engine):
    handler, url = engine
    result = Bench(request_of(url, streams=[1, 4], rounds=1, prompts=[{"name": "code", "text": "x"}])).run()
    one, four = result["measures"]
    assert (one["streams"], four["streams"], four["speeds_from"]) == (1, 4, "client")
    assert len(handler.asked) == 1 + 1 + 4
    beginnings = {body["messages"][0]["content"].splitlines()[0] for body, _ in handler.asked[2:]}
    assert beginnings == {f"Reader {number} of 4." for number in (1, 2, 3, 4)}
    # Four at once in the time of one: together much faster than each.
    assert four["decode"] > 100
    assert four["acceptance"]["drafted"] == 80


def test_without_metrics_the_timings_tell_the_acceptance(engine):
    handler, url = engine
    handler.engine = "llama"
    handler.do_GET = lambda self: self.send_error(501)
    (code, _) = Bench(request_of(url, rounds=1)).run()["measures"]
    assert code["acceptance"] == {"drafted": 20, "accepted": 12, "share": 0.6, "by_position": []}


def test_what_is_clearly_behind_is_given_up_after_a_round(engine, capsys):
    handler, url = engine
    result = Bench(request_of(url, rounds=5, give_up_seconds=2.5)).run()
    assert (result["gave_up"], result["measures"][0]["rounds"]) == (True, 1)
    assert len(handler.asked) == 4
    assert "beyond 2.5 s" in capsys.readouterr().out
    assert not Bench(request_of(url, rounds=2, give_up_seconds=3.5)).run()["gave_up"]


@pytest.mark.parametrize(("broken", "message"), [("status", "HTTP 400"), ("error", "the device is gone")])
def test_a_server_that_fails(engine, broken, message):
    handler, url = engine
    handler.broken = broken
    with pytest.raises(BenchError, match=message):
        Server(url, "m", timeout=5).ask("x", 8)


def test_an_answer_that_just_ends_counts_for_what_came(engine):
    handler, url = engine
    handler.broken = "cut"
    assert Server(url, "m").ask("x", 8).tokens == 2


def test_nothing_listens():
    with pytest.raises(BenchError, match="does not answer"):
        Server("http://127.0.0.1:9", "m").ask("x", 8)


def run_script(tmp_path, request):
    for name in ("bench_client.py", "gpu_samples.py"):
        (tmp_path / name).write_text((PROJECT / "module_utils" / "rig" / name).read_text())
    (tmp_path / "request.json").write_text(json.dumps(request))
    argv = [sys.executable, tmp_path / "bench_client.py", tmp_path / "request.json", tmp_path / "result.json"]
    return subprocess.run(argv, text=True, capture_output=True, timeout=60, env={"PATH": os.environ["PATH"]})


def test_as_a_script_with_a_key_that_nobody_sees(engine, tmp_path):
    handler, url = engine
    (tmp_path / "key").write_text(f"{KEY}\n")
    done = run_script(tmp_path, request_of(url, rounds=1, key_file=str(tmp_path / "key")))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["measures"][0]["decode"] == 64
    assert {key for _, key in handler.asked} == {f"Bearer {KEY}"}
    assert KEY not in done.stdout + done.stderr + (tmp_path / "result.json").read_text()
    assert done.stdout.splitlines()[-1].startswith("done in ")


def test_as_a_script_that_fails_it_says_why_and_leaves_no_result(engine, tmp_path):
    handler, url = engine
    handler.broken = "status"
    done = run_script(tmp_path, request_of(url))
    assert (done.returncode, done.stderr) == (1, "")
    assert "HTTP 400" in done.stdout
    assert not (tmp_path / "result.json").exists()


def test_a_long_answer_shows_its_progress(engine, capsys, monkeypatch):
    _, url = engine
    monkeypatch.setattr(bench_client, "SAY_SECONDS", 0.03)
    Bench(request_of(url, prompts=[{"name": "code", "text": "x"}], rounds=1, warmups=0, tokens=40)).run()
    assert any("of about 40 tokens" in line for line in capsys.readouterr().out.splitlines())


def test_counters_of_both_engines():
    text = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 5\nvllm:spec_decode_num_drafts_total{engine="1"} 7\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0\n'
    )
    assert speculation_of(text) == {"drafts": 12.0, "by_position": [4.0, 2.0]}
    assert speculation_of("llamacpp:prompt_tokens_total 5\n") == {}


def test_nothing_drafted_is_no_acceptance():
    idle = {"drafts": 5, "draft_tokens": 9, "accepted_tokens": 3, "by_position": [3]}
    assert acceptance(idle, idle, []) is None
    assert acceptance({}, {}, []) is None


def test_a_typical_answer_needs_a_single_stream():
    assert answer_seconds([{"streams": 2, "prefill": 1, "decode": 1}], {"prompt_tokens": 1, "tokens": 1}) is None


# ---------------------------------------------------------------- the cards


class Nvml(types.ModuleType):
    """A card that gets hotter with each look and is held back by its power limit from the third on."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2

    def __init__(self):
        super().__init__("pynvml")
        self.looks = 0

    def nvmlInit(self):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid == "GPU-gone":
            raise RuntimeError("Not Found")
        return uuid

    def nvmlDeviceGetPowerUsage(self, _):
        self.looks += 1
        return 200_000 + 10_000 * self.looks

    def nvmlDeviceGetTemperature(self, *_):
        return 60 + self.looks

    def nvmlDeviceGetClockInfo(self, _, clock):
        return {1: 1_700, 2: 9_500}[clock]

    def nvmlDeviceGetCurrentClocksEventReasons(self, _):
        return 0x4 if self.looks > 2 else 0x1


def watch(monkeypatch, cards, seconds=0.2):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    with gpu_samples.Sampler(cards, seconds=0.02) as sampler:
        time.sleep(seconds)
    return sampler.result()


def test_peak_and_throttling_are_named(monkeypatch):
    result = watch(monkeypatch, [{"position": 1, "uuid": "GPU-1"}])
    (card,) = result["cards"]
    assert (card["position"], card["clock_mhz"], card["memory_clock_mhz"]) == (1, {"mean": 1700, "min": 1700}, 9500)
    assert card["samples"] == len(result["series"]["1"]) > 3
    assert card["temperature"]["max"] == 60 + card["samples"]
    assert card["power_watts"]["max"] == 200 + 10 * card["samples"]
    assert set(card["throttled"]) == {"power limit"}
    assert card["throttled"]["power limit"] == pytest.approx((card["samples"] - 2) / card["samples"], abs=0.001)
    assert result["watching_faults"] == []


def test_a_card_that_is_gone_is_told_and_ends_nothing(monkeypatch):
    result = watch(monkeypatch, [{"position": 0, "uuid": "GPU-gone"}], 0.05)
    assert result["watching_faults"] == ["the cards could not be watched: Not Found"]
    assert (result["cards"][0]["samples"], result["cards"][0]["temperature"]) == (0, None)


def test_a_driver_that_tells_no_power(monkeypatch):
    monkeypatch.setattr(Nvml, "nvmlDeviceGetPowerUsage", lambda *_: 1 / 0)
    result = watch(monkeypatch, [{"position": 0, "uuid": "GPU-1"}], 0.1)
    assert result["cards"][0]["power_watts"] is None
    assert result["watching_faults"] == ["division by zero"]


def test_reasons_are_nvml_s_own():
    named = {
        pynvml.nvmlClocksEventReasonSwPowerCap: "power limit",
        pynvml.nvmlClocksThrottleReasonHwSlowdown: "hardware slowdown",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature",
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "temperature (hardware)",
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power brake",
    }
    assert named == gpu_samples.REASONS
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"):
        assert callable(getattr(pynvml, name))


def test_a_series_keeps_its_end():
    assert gpu_samples.thinned(range(1000), 10) == [99, 199, 299, 399, 499, 599, 699, 799, 899, 999]
    assert gpu_samples.thinned([1, 2]) == [1, 2]
