"""Sizes are checked against the world, and every rank has its place."""

import itertools
import math

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dist import ParallelLayout

sizes = st.integers(1, 4)
layouts = st.builds(
    ParallelLayout, replicate=sizes, shard=sizes, tensor=sizes, context=sizes, pipeline=sizes, expert=st.just(1)
)


@given(layouts)
def test_short_form_is_read_back(layout):
    read = ParallelLayout.parse(str(layout)).resolve(layout.world_size)
    assert read == layout.resolve(layout.world_size)


@given(layouts)
def test_coordinates_number_the_ranks_with_tensor_neighbours_innermost(layout):
    axes = ("pipeline", "replicate", "shard", "context", "tensor")
    places = itertools.product(*(range(size) for size in layout.sizes().values()))
    for rank, place in enumerate(places):
        assert layout.coordinate(rank) == dict(zip(axes, place, strict=True))
    assert {layout.data_coordinate(rank) for rank in range(layout.world_size)} == set(range(layout.data_size))
    for group in layout.groups(("tensor",)):
        assert group == list(range(group[0], group[0] + layout.tensor))


def test_auto_takes_what_is_left():
    assert ParallelLayout.parse("pp=2,tp=2").resolve(16).shard == 4
    assert ParallelLayout().resolve(1).world_size == 1


@pytest.mark.parametrize(
    ("text", "world", "words"),
    [
        ("pp=3", 8, "3 (pipeline) = 3 does not divide 8"),
        ("shard=2,replicate=2,tp=3", 8, "2 (replicate) x 2 (shard) x 3 (tensor) = 12, but the world has 8 ranks"),
        ("ep=4,shard=2", 2, "expert=4 is taken out of shard x context = 2 x 1 = 2"),
    ],
)
def test_sizes_that_do_not_fit_show_the_arithmetic(text, world, words):
    with pytest.raises(ValueError) as error:
        ParallelLayout.parse(text).resolve(world)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shards=2", "'shards=2'"),
        ("shard", "'shard'"),
        ("shard=0", "'shard=0'"),
        ("pp=auto", "'pp=auto'"),
        ("tp=2,tp=2", "names 'tp' twice"),
        ("tp=-1", "'tp=-1'"),
    ],
)
def test_text_that_is_no_layout_is_named(text, words):
    with pytest.raises(ValueError) as error:
        ParallelLayout.parse(text)
    assert words in str(error.value)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "2", None])
def test_a_size_is_a_whole_number(size):
    with pytest.raises(ValueError, match="tensor"):
        ParallelLayout(tensor=size)


def test_a_mesh_of_4096_ranks_has_the_axes_above_one():
    layout = ParallelLayout.parse("pp=8,replicate=4,shard=16,tp=8").resolve(4096)
    rank = 1234
    dist.init_process_group("fake", rank=rank, world_size=4096, store=FakeStore())
    try:
        mesh = layout.build_mesh("cpu")
        assert mesh.mesh_dim_names == ("pipeline", "replicate", "shard", "tensor")
        assert mesh.get_coordinate() == tuple(layout.coordinate(rank)[axis] for axis in mesh.mesh_dim_names)
        (group,) = (group for group in layout.groups(("shard",)) if rank in group)
        assert dist.get_process_group_ranks(mesh["shard"].get_group()) == group
        assert math.prod(mesh.shape) == 4096
    finally:
        dist.destroy_process_group()
