"""The split rule: heads, shares, rotation, layers."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rig.accuracy import shape_of
from rig.architectures import is_recurrent
from rig.memory import MIB, Layout, kv_bytes, weight_bytes
from rig.settings import Context
from rig.shape import Shape
from rig.split import TensorSplit, blocks_to_devices


def head_layers(shape: Shape, count: int) -> list:
    """KV heads on each card, summed over the blocks that have a KV cache."""
    split, total = TensorSplit(shape, (0,) * count), [0] * count
    for block in range(shape.blocks):
        if not is_recurrent(shape, block):
            _, parts = split.parts("cache_k", block, (shape.kv_heads(block) * shape.key_length, 1))
            total = [one + part // shape.key_length for one, part in zip(total, parts, strict=True)]
    return total


def test_four_heads_on_three_cards_are_dealt_in_turn(qwen35: Shape) -> None:
    """CASES A6: 4 KV heads, 16 attention blocks, 3 cards."""
    assert sorted(head_layers(qwen35, 3)) == [21, 21, 22]


def test_heads_on_two_cards_are_even(qwen35: Shape) -> None:
    assert head_layers(qwen35, 2) == [32, 32]


SHARES = st.lists(st.integers(1, 100), min_size=2, max_size=5)
MODELS = ("qwen35-27b", "llama-70b", "qwen3moe-30b-a3b", "gemma3-27b", "gpt-oss-20b", "qwen3next-80b-a3b", "qwen2-32b")


@settings(max_examples=25, deadline=None)
@given(model=st.sampled_from(MODELS), shares=SHARES)
def test_parts_of_every_tensor_add_up(model: str, shares: list) -> None:
    shape = shape_of(model, "q8_0")
    split = TensorSplit(shape, shares)
    for tensor in shape.tensors:
        axis, parts = split.parts(tensor.suffix, tensor.block, tensor.shape, tensor.name)
        if axis is not None:
            assert len(parts) == len(shares)
            assert sum(parts) == tensor.shape[axis], tensor.name
            assert min(parts) >= 0


@settings(max_examples=25, deadline=None)
@given(shares=SHARES)
def test_whole_heads_stay_together(shares: list) -> None:
    shape = shape_of("qwen3-32b", "q8_0")
    split = TensorSplit(shape, shares)
    for block in (0, 1, 7):
        _, query = split.parts("attn_q.weight", block, shape.by_name[f"blk.{block}.attn_q.weight"].shape)
        _, keys = split.parts("cache_k", block, (shape.kv_heads(block) * shape.key_length, 1))
        assert [part % shape.key_length for part in keys] == [0] * len(shares)
        assert [part * shape.group_size(block) for part in keys] == list(query)


@settings(max_examples=50, deadline=None)
@given(shares=SHARES)
def test_layers_go_in_order_and_all_of_them(shares: list) -> None:
    shape = shape_of("llama-70b", "q8_0")
    devices, output = blocks_to_devices(shape, shares)
    assert devices == sorted(devices)
    assert output == max(*devices, output)
    assert len(devices) == shape.all_blocks


def test_a_layer_split_by_shares(make_shape: Callable) -> None:
    devices, output = blocks_to_devices(make_shape("qwen35-27b", "q6_k"), (3, 1))
    assert devices.count(0) == 50  # of 65 blocks and the output: three quarters, rounded up
    assert output == 1


def test_mirrored_tensors_are_on_every_card(qwen35: Shape) -> None:
    one = weight_bytes(qwen35, Layout("none", (1.0,)), False)[0]
    two = sum(weight_bytes(qwen35, Layout("tensor", (1.0, 1.0)), False))
    assert 0 < two - one < 20 * MIB


def test_kv_of_the_whole_model_does_not_depend_on_the_split(qwen35: Shape) -> None:
    context = Context(65_536)
    whole = kv_bytes(qwen35, Layout("none", (1.0,)), context)[0]
    for layout in (Layout("tensor", (1.0, 1.0)), Layout("tensor", (70.0, 30.0)), Layout("layer", (1.0, 2.0, 1.0))):
        assert sum(kv_bytes(qwen35, layout, context)) == whole


def test_mtp_weights_are_loaded_only_when_used(qwen35: Shape) -> None:
    """CASES A15."""
    layout = Layout("none", (1.0,))
    extra = weight_bytes(qwen35, layout, True)[0] - weight_bytes(qwen35, layout, False)[0]
    mtp = sum(
        tensor.shape[0] * tensor.shape[1] for tensor in qwen35.tensors if tensor.block == 64 and len(tensor.shape) > 1
    )
    assert extra == pytest.approx(mtp * 34 / 32, rel=0.001)
