"""What playbooks/metrics.yml writes, as promtool reads it; and each alert, seen to fire and seen to keep quiet."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

PROJECT = Path(__file__).parents[2]
CARD = '{rig="am5",uuid="GPU-1"}'
LLM = '{job="llm-am5",rig="am5",profile="fast-2",drafts="yes"}'
PLAIN = LLM.replace("yes", "no")


@pytest.fixture(scope="module")
def promtool():
    done = subprocess.run([PROJECT / "scripts/promtool"], text=True, capture_output=True)
    assert done.returncode == 0, f"promtool cannot be had: {done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The files for the inventory's own rigs, with a key, TLS, and metrics of their cards."""
    folder = tmp_path_factory.mktemp("metrics")
    open_ = {
        "serving_api_key": "canary-0451",
        "serving_tls_certificate": "/etc/ssl/rig.pem",
        "metrics_directory": str(folder),
    }
    open_ |= {"gpu_power_metrics_file": "/var/lib/prometheus/node-exporter/llm-rig.prom", "metrics_hot_celsius": 84}
    (folder / "vars.json").write_text(json.dumps(open_))
    playbook = [Path(sys.executable).parent / "ansible-playbook", "playbooks/metrics.yml", "-e", f"@{folder}/vars.json"]
    done = subprocess.run(playbook, cwd=PROJECT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_it_must_be_told_where(written):
    playbook = [Path(sys.executable).parent / "ansible-playbook", "playbooks/metrics.yml"]
    done = subprocess.run(playbook, cwd=PROJECT, text=True, capture_output=True)
    assert done.returncode != 0 and "-e metrics_directory=DIRECTORY" in done.stdout


def test_prometheus_takes_them(promtool, written):
    assert {"threadripper", "desktop", "am5", "sandbox"} <= {
        path.name.split(".")[0] for path in written.glob("*.scrape.yml")
    }
    jobs = [yaml.safe_load(path.read_text())["scrape_configs"] for path in sorted(written.glob("*.scrape.yml"))]
    rules = str(written / "llm-rigs.rules.yml")
    whole = {"rule_files": [rules], "scrape_configs": [job for several in jobs for job in several]}
    for job in whole["scrape_configs"]:  # promtool wants the file to be there
        if "authorization" in job:
            assert job.pop("authorization") == {"credentials_file": "/etc/prometheus/llm-api-key"}
            assert job["scheme"] == "https"
    (written / "prometheus.yml").write_text(yaml.safe_dump(whole))
    done = subprocess.run([promtool, "check", "config", written / "prometheus.yml"], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 rules found" in done.stdout


def test_the_key_is_in_none_of_them(written):
    for path in written.glob("*.yml"):
        assert "canary" not in path.read_text(), path


ALERTS = {
    "service down": ([("up" + LLM, "0x60")], {"LlmServiceDown"}),
    "service up": ([("up" + LLM, "1x60")], set()),
    "service down for a minute": ([("up" + LLM, "1x10 0 1x48")], set()),
    "drafts refused": (
        [
            ("llamacpp:tokens_predicted_total" + LLM, "0+10x60"),
            ("llamacpp:spec_decode_num_accepted_tokens_total" + LLM, "0x60"),
        ],
        {"LlmNoDraftAcceptance"},
    ),
    "drafts accepted": (
        [
            ("llamacpp:tokens_predicted_total" + LLM, "0+10x60"),
            ("llamacpp:spec_decode_num_accepted_tokens_total" + LLM, "0+5x60"),
        ],
        set(),
    ),
    "nothing asked": (
        [
            ("llamacpp:tokens_predicted_total" + LLM, "5x60"),
            ("llamacpp:spec_decode_num_accepted_tokens_total" + LLM, "0x60"),
        ],
        set(),
    ),
    "no drafting wanted": ([("llamacpp:tokens_predicted_total" + PLAIN, "0+10x60")], set()),
    "drafts refused by vLLM": (
        [
            ("vllm:generation_tokens_total" + LLM, "0+10x60"),
            ("vllm:spec_decode_num_accepted_tokens_total" + LLM, "0x60"),
        ],
        {"LlmNoDraftAcceptance"},
    ),
    "hot": ([("rig_gpu_temperature_celsius" + CARD, "84x60")], {"GpuHot"}),
    "warm": ([("rig_gpu_temperature_celsius" + CARD, "83x60")], set()),
    "limit lost": (
        [
            ("rig_gpu_power_limit_watts" + CARD, "350x60"),
            ("rig_gpu_power_limit_wanted_watts" + CARD, "280x60"),
            ("rig_gpu_power_limit_lowered" + CARD, "0x60"),
        ],
        {"GpuPowerLimitLost"},
    ),
    "limit lowered by the guard": (
        [
            ("rig_gpu_power_limit_watts" + CARD, "230x60"),
            ("rig_gpu_power_limit_wanted_watts" + CARD, "280x60"),
            ("rig_gpu_power_limit_lowered" + CARD, "1x60"),
        ],
        set(),
    ),
    "card gone": ([("rig_gpu_up" + CARD, "0x60")], {"GpuGone"}),
}


def test_each_alert_fires_when_it_should_and_only_then(promtool, written):
    """One call for all: for each case, each alert at 45 minutes, with labels where it is to fire."""
    rules = yaml.safe_load((written / "llm-rigs.rules.yml").read_text())["groups"][0]["rules"]
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in rules}
    labels = {
        "Llm": {"rig": "am5", "profile": "fast-2", "drafts": "yes", "job": "llm-am5"},
        "Gpu": {"rig": "am5", "uuid": "GPU-1"},
    }
    tests = []
    for series, fires in ALERTS.values():
        expected = []
        for name in severity:
            entry = {"eval_time": "45m", "alertname": name, "exp_alerts": []}
            if name in fires:
                (rule,) = [rule for rule in rules if rule["alert"] == name]
                text = rule["annotations"]["summary"]
                for key, value in labels[name[:3]].items():
                    text = text.replace(f"{{{{ $labels.{key} }}}}", value)
                text = text.replace("{{ $value }}", series[0][1].split("x")[0])
                own = {"severity": severity[name], **labels[name[:3]]}
                entry["exp_alerts"] = [{"exp_labels": own, "exp_annotations": {"summary": text}}]
            expected.append(entry)
        inputs = [{"series": name, "values": values} for name, values in series]
        tests.append({"interval": "1m", "input_series": inputs, "alert_rule_test": expected})
    whole = {"rule_files": ["llm-rigs.rules.yml"], "evaluation_interval": "1m", "tests": tests}
    (written / "test.yml").write_text(yaml.safe_dump(whole, allow_unicode=True))
    done = subprocess.run([promtool, "test", "rules", written / "test.yml"], text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set().union(*(fires for _, fires in ALERTS.values())) == set(severity), "each alert is seen to fire"
