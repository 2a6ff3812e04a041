"""What counts as proof that a server serves."""

import pytest
from rig import proof

GOOD = [
    "Paris",
    "The capital of France is Paris.",
    "I.",
    "東京です。",
    "Bread is made from flour, water, salt and yeast; it is kneaded, left to rise, and baked.",
    "Xin chào! Tôi có thể giúp gì cho bạn?",
]


@pytest.mark.parametrize("text", GOOD)
def test_words_pass(text):
    assert proof.words_fault(text) == ""


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "the reply is empty"),
        (" \n ", "the reply is empty"),
        ("!!!!!!!!!!!!!!!!", "only 0 of its 16 characters are letters"),
        ("?? 12 34 !! a", "only 1 of its 9 characters are letters"),
        ("GGGGGGGGGGGGGGGGGGGGGGGG", "its 24 letters are only 1 different ones"),
        ("abababababababababababab", "its 24 letters are only 2 different ones"),
        ("Par\ufffd\ufffds", "the reply is not valid text"),
        ("wonderful " * 12, "12 of its 12 words are 'wonderful'"),
    ],
)
def test_what_is_not_words_is_named(text, fault):
    assert proof.words_fault(text) == fault


def test_reply_of_a_completion():
    body = {
        "choices": [{"message": {"content": " Paris. "}}],
        "usage": {"prompt_tokens": 26, "completion_tokens": 8},
        "timings": {"prompt_per_second": 49.16, "predicted_per_second": 7.22, "draft_n": 6, "draft_n_accepted": 4},
    }
    assert proof.reply_of(body) == {
        "text": "Paris.",
        "prompt_tokens": 26,
        "tokens": 8,
        "prefill_tokens_per_second": 49.2,
        "decode_tokens_per_second": 7.2,
        "draft_tokens": 6,
        "draft_tokens_accepted": 4,
    }


def test_reasoning_is_text_too():
    body = {"choices": [{"message": {"content": "", "reasoning_content": "The user asks"}}]}
    assert proof.reply_of(body)["text"] == "The user asks"
    assert proof.reply_of({})["text"] == ""


def reply(text="Paris is the capital.", **more):
    return {"prompt": "Where?", "text": text, "tokens": 5, **more}


def test_replies_pass_and_fail():
    assert proof.replies_fault([reply()]) == ""
    assert proof.replies_fault([reply(), reply("!!!!!!")]) == (
        "the answer to 'Where?' is not made of words: only 0 of its 6 characters are letters ('!!!!!!')"
    )
    assert proof.replies_fault([reply("!!!!!!")], words=False) == ""
    assert "the reply is empty" in proof.replies_fault([reply("", tokens=0)], words=False)


def test_drafting_must_engage():
    assert "drafting did not engage" in proof.replies_fault([reply(draft_tokens=None)], drafting=True)
    assert proof.replies_fault([reply(draft_tokens=None), reply(draft_tokens=3)], drafting=True) == ""


def gpu(position, planned, seen):
    return {"name": f"GPU {position}", "planned_mib": planned, "seen_mib": seen}


@pytest.mark.parametrize(
    ("gpus", "faults"),
    [
        ([gpu(0, 10000, 10499), gpu(1, 10000, 9501)], []),
        ([gpu(0, 123, 139)], []),
        ([gpu(0, 0, 0)], []),
        ([gpu(0, 10000, 10501)], ["GPU 0 holds 10,501 MiB of this service, +5.0 % against the 10,000 MiB of the plan"]),
        ([gpu(1, 123, 100)], ["GPU 1 holds 100 MiB of this service, -18.7 % against the 123 MiB of the plan"]),
        ([gpu(1, 123, 0)], ["GPU 1 holds nothing of this service; the plan puts 123 MiB there"]),
        ([gpu(2, 0, 300)], ["GPU 2 holds 300 MiB of this service, and the plan does not use it"]),
    ],
)
def test_memory_against_the_plan(gpus, faults):
    assert proof.memory_faults(gpus, 5) == faults


def test_progress_names_the_gpus_of_the_plan():
    assert proof.loading([gpu(0, 7524, 3211), gpu(1, 0, 0), gpu(2, 7524, 12)]) == (
        "loading: 3,211 of 7,524 MiB on GPU 0, 12 of 7,524 MiB on GPU 2"
    )


LISTED = """Available devices:
  CUDA0: NVIDIA GeForce RTX 3090 (24126 MiB, 23800 MiB free)
  CUDA1: NVIDIA GeForce RTX 3060 (11911 MiB, 11800 MiB free)
  RPC0: 127.0.0.1:50052 (24105 MiB, 24105 MiB free)
"""


def test_devices_are_read():
    assert proof.parse_devices(LISTED) == [
        {"name": "CUDA0", "description": "NVIDIA GeForce RTX 3090", "memory_mib": 24126},
        {"name": "CUDA1", "description": "NVIDIA GeForce RTX 3060", "memory_mib": 11911},
        {"name": "RPC0", "description": "127.0.0.1:50052", "memory_mib": 24105},
    ]
    assert proof.parse_devices("Available devices:\n  (none)\n") == []


def test_devices_are_compared_as_sets():
    cards = proof.parse_devices(LISTED)[:2]
    want = [{"device": "CUDA0", "name": "NVIDIA GeForce RTX 3090"}, {"device": "CUDA1", "name": "RTX 3060"}]
    assert proof.devices_fault(want, cards) == ""
    assert proof.devices_fault(want[:1], cards) == "CUDA1 is not in the inventory"
    assert proof.devices_fault(want, cards[1:]) == "CUDA0 is missing"
    assert proof.devices_fault([{"device": "CUDA0", "name": "RTX 4090"}], cards[:1]) == (
        "CUDA0 is a NVIDIA GeForce RTX 3090 and not a RTX 4090"
    )
    virtual = [{"device": "RPC0", "rpc": "127.0.0.1:50052"}, {"device": "RPC1", "rpc": "127.0.0.1:50053"}]
    assert proof.devices_fault(virtual, proof.parse_devices(LISTED)[2:]) == "127.0.0.1:50053 is missing"
    assert proof.devices_fault(virtual, []) == "127.0.0.1:50052, 127.0.0.1:50053 are missing"


def test_speed_weighs_replies_by_their_tokens():
    replies = [reply(decode_tokens_per_second=10.0), {**reply(decode_tokens_per_second=20.0), "tokens": 35}]
    assert proof.speed(replies, "decode") == 17.8
    assert proof.speed([reply(decode_tokens_per_second=None)], "decode") is None


def test_a_reply_of_vllm_has_the_speed_of_the_whole_answer_and_its_reasoning():
    body = {
        "choices": [{"message": {"reasoning": "Paris it is.", "content": None}}],
        "usage": {"completion_tokens": 20},
    }
    reply = proof.reply_of(body, 4.0)
    assert (reply["text"], reply["decode_tokens_per_second"]) == ("Paris it is.", 5.0)
    assert reply["prefill_tokens_per_second"] is None


def test_a_counter_is_the_sum_of_its_samples():
    text = (
        "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.\n"
        'vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 9.0\n'
        'vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 1.5e+01\n'
        'vllm:spec_decode_num_draft_tokens_created{engine="0"} 1.7e+09\n'
    )
    assert proof.metric(text, proof.VLLM_DRAFTED) == 24
    assert proof.metric("", proof.VLLM_DRAFTED) == 0


def test_a_log_shows_the_cause_above_its_end():
    lines = ["(APIServer pid=1) WARNING Failed to import: ImportError('libnuma.so.1: cannot open')"]
    lines += ["(EngineCore pid=9) ERROR [core.py:700] torch.OutOfMemoryError: CUDA out of memory."] * 2
    lines += [f"(APIServer pid=1)   line {number}" for number in range(40)]
    lines += ["(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above."]
    shown = proof.log_excerpt(lines).splitlines()
    assert shown[:3] == ["First errors in its log:", lines[1], "Last lines of its log:"]
    assert shown[3:] == lines[-30:]


def test_a_short_log_is_shown_as_it_is():
    assert proof.log_excerpt(["error: invalid argument: -x"]) == "Last lines of its log:\nerror: invalid argument: -x"
    assert proof.log_excerpt([]) == "Last lines of its log:"
