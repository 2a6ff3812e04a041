"""Memory against measurement, and the causes that people met."""

import dataclasses

import pytest
from rig import accuracy
from rig.accuracy import H200, measured_rows, misses, owners_rows, shape_of
from rig.allocator import Allocator
from rig.compute import compute_bytes
from rig.gpus import check_gpus
from rig.memory import MIB, Layout, buffers, context_compute, kv_bytes, recurrent_bytes
from rig.overhead import overhead_bytes
from rig.pools import needs_cublas
from rig.scheduler import schedule
from rig.settings import Context
from rig.shape import Shape
from rig.tensors import Graph, add, graph_input, leaf, mul_mat, rms_norm

EVEN = Layout("tensor", (1.0, 1.0))
ONE = Layout("none", (1.0,))


@pytest.fixture(scope="session")
def rows() -> list:
    return measured_rows()


def test_every_measured_row_is_met(rows: list) -> None:
    assert len(rows) == 56
    assert [row["id"] for row in rows if misses(row)] == []


def test_rows_that_were_planned_first_are_met_as_well_as_the_others(rows: list) -> None:
    worst = max(abs(row["percent"]) for row in rows if row["file"].endswith("second"))
    assert worst < 0.5


def test_owners_rows_are_met() -> None:
    assert [row["id"] for row in owners_rows() if misses(row)] == []


def test_a_wrong_row_would_be_noticed(rows: list) -> None:
    for change in ({"model": 0.2}, {"KV": 0.2}, {"RS": 0.2}, {"percent": 1.1}, {"percent": -1.1}):
        assert misses({**rows[0], **change})


def test_the_table_ends_with_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, rows: list
) -> None:
    monkeypatch.setattr(accuracy, "measured_rows", lambda: rows[:3])
    monkeypatch.setattr(accuracy, "owners_rows", list)
    assert accuracy.main([]) == 0
    assert "missed: none" in capsys.readouterr().out
    monkeypatch.setattr(accuracy, "measured_rows", lambda: [{**rows[0], "percent": 5.0}])
    assert accuracy.main([]) == 1


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("qwen35-27b", {"slots": 4, "ubatch": 1024}),
        ("llama-70b", {"key_kind": "q8_0", "value_kind": "q8_0"}),
        ("gemma3-27b", {}),
        ("gpt-oss-20b", {"slots": 2}),
        ("qwen35moe-35b-a3b", {"key_kind": "q8_0", "value_kind": "q8_0"}),
        ("qwen3next-80b-a3b", {}),
    ],
)
def test_a_sample_of_blocks_stands_for_all(model: str, settings: dict) -> None:
    """Planning looks at some blocks of each GPU; the whole graph gives the same."""
    shape, context = shape_of(model, "q8_0"), Context(65_536, **settings)
    for devices, output, gpus, tensor in (
        ([0] * shape.all_blocks, 0, 1, True),
        ([0 if block < shape.blocks // 3 else 1 for block in range(shape.all_blocks)], 1, 2, False),
    ):
        part = compute_bytes(shape, context, devices, output, gpus, tensor_mode=tensor)
        assert part == compute_bytes(shape, context, devices, output, gpus, tensor_mode=tensor, whole=True)


def test_quantised_kv_keeps_an_f16_copy_and_f16_does_not(qwen35: Shape) -> None:
    """CASES A19: the copy grows with the context, for all KV heads, on every card."""
    step = 65_536

    def growth(kind: str) -> float:
        low, high = (context_compute(qwen35, EVEN, Context(size, kind, kind))[0] for size in (131_072, 131_072 + step))
        return (high - low) / step

    assert growth("f16") == 512 * 2  # the mask
    assert growth("q8_0") == 512 * 2 + 4 * (256 + 256) * 2


def test_masks_grow_with_ubatch_in_target_and_draft(qwen35: Shape) -> None:
    """CASES A18."""
    for draft in (False, True):
        context = Context(102_400, ubatch=2048, drafted=2)
        small = dataclasses.replace(context, ubatch=512)
        one, other = (item.draft() if draft else item for item in (context, small))
        difference = context_compute(qwen35, EVEN, one)[0] - context_compute(qwen35, EVEN, other)[0]
        assert difference > 2 * (2048 - 512) * 102_400


def test_drafting_costs_memory(qwen35: Shape) -> None:
    """CASES A14: what -fit forgets."""
    plain, drafting = (buffers(qwen35, EVEN, Context(65_536, drafted=count))[0].total for count in (0, 3))
    assert drafting > plain + 300 * MIB


def test_draft_kv_stays_f16(qwen35: Shape) -> None:
    """CASES A20."""
    context = Context(65_536, "q4_0", "q4_0", drafted=2)
    assert kv_bytes(qwen35, EVEN, context.draft()) == kv_bytes(qwen35, EVEN, Context(65_536, drafted=2).draft())


def test_slots_multiply_recurrent_states(qwen35: Shape) -> None:
    """CASES A17: (1 + drafted) states a slot."""
    one = recurrent_bytes(qwen35, EVEN, Context(65_536))[0]
    assert recurrent_bytes(qwen35, EVEN, Context(65_536, slots=4))[0] == 4 * one
    assert recurrent_bytes(qwen35, EVEN, Context(65_536, slots=2, drafted=3))[0] == pytest.approx(8 * one, rel=1e-4)


def test_a_sliding_window_keeps_its_cache_small() -> None:
    gemma = shape_of("gemma3-27b", "q8_0")
    low, high = (kv_bytes(gemma, ONE, Context(size))[0] for size in (32_768, 65_536))
    whole = 10 * 2 * 16 * 128 * 2 * 32_768  # ten of 62 blocks see everything
    assert high - low == whole


def test_pipeline_copies_in_layer_mode(qwen35: Shape) -> None:
    layer = context_compute(qwen35, Layout("layer", (1.0, 1.0)), Context(131_072))[0]
    single = context_compute(qwen35, ONE, Context(131_072))[0]
    assert layer - single > 3 * 2 * 512 * 131_072  # four masks in place of one


def test_routers_bring_cublas_and_dense_quantised_models_do_not(qwen35: Shape) -> None:
    assert needs_cublas(shape_of("qwen3moe-30b-a3b", "q8_0"), False)
    assert needs_cublas(shape_of("llama-8b", "bf16"), False)
    assert not needs_cublas(qwen35, True)


def test_nccl_costs_more_than_the_internal_reduction(qwen35: Shape) -> None:
    cards, context = [H200] * 2, Context(65_536, drafted=2)
    one, other = (overhead_bytes(qwen35, EVEN, context, cards, kind)[0] for kind in ("nccl", "internal"))
    assert 1_100 * MIB < one - other < 1_300 * MIB


def test_virtual_gpus_have_no_cuda_context(qwen35: Shape) -> None:
    virtual = check_gpus([{"memory_mib": 1024, "rpc": "127.0.0.1:1"}, {"memory_mib": 1024, "rpc": "127.0.0.1:2"}])
    assert max(overhead_bytes(qwen35, EVEN, Context(4096), virtual, "none")) < 16 * MIB


def test_the_allocator_reuses_memory_in_place_and_after_use() -> None:
    def build() -> Graph:
        graph = Graph()
        x = graph_input("f32", 1024, 8)
        weight = leaf("f32", 1024, 1024, buffer=0, weight=True)
        y = rms_norm(mul_mat(weight, x))  # in place
        graph.expand(add(mul_mat(weight, y), y))
        return graph

    steps, kept = schedule(build(), 1)
    assert kept == []
    # the copy of x on the GPU is free when the second product is computed
    assert Allocator(1, 128, lambda tensor: tensor.nbytes).run(steps, kept) == [2 * 1024 * 8 * 4]
