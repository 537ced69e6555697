"""What the search cuts could not have won, and a model of 405 billion parameters is planned in seconds."""

import resource
import time
from dataclasses import replace

import pytest

from lightning_dist.advisor import Cluster, Link, advise, choose_layout, search
from lightning_dist.advisor.model_reader import build_on_meta, read_model
from lightning_dist.advisor.search import divisors
from tests.advisor import models
from tests.advisor.by_hand import GB, INTER, INTRA, Layers

LAYERS = Layers(16, 0.2e9, 2e12, saved=0.6 * GB, kept=0.3 * GB, received=0.05 * GB, reduced=0.1 * GB)


@pytest.mark.parametrize("inter", [INTER, Link(1e9, 15e-6), Link(100e9, 5e-6)])
@pytest.mark.parametrize("memory", [24 * GB, 80 * GB])
@pytest.mark.parametrize("batch", [32, 256])
def test_no_mesh_that_is_cut_would_have_won(monkeypatch, inter, memory, batch):
    machines = Cluster(32, 8, memory, INTRA, inter, 100e12)
    layers = replace(LAYERS, query=0.05 * GB, key_value=0.02 * GB, heads=32, refused=("expert",))
    quick = search.search(layers.profile(), machines, batch)
    monkeypatch.setattr(search, "CLEARLY_SLOWER", float("inf"))
    whole = search.search(layers.profile(), machines, batch)
    assert whole.evaluated >= quick.evaluated
    assert [e.candidate for e in quick.fitting[:3]] == [e.candidate for e in whole.fitting[:3]]


def test_divisors():
    assert divisors(24) == [1, 2, 3, 4, 6, 8, 12, 24]
    assert divisors(1) == [1] and divisors(7) == [1, 7] and divisors(16) == [1, 2, 4, 8, 16]


@pytest.mark.slow
def test_405_billion_parameters_on_16384_devices_take_seconds_and_no_memory():
    begin = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module, batch = build_on_meta(models.llama_405b)
    profile = read_model(module, batch, precision="bf16-gathered")
    assert profile.num_parameters == 405_853_388_800
    advice = advise(
        profile,
        devices=16384,
        devices_per_node=8,
        memory="80GB",
        intra="450GB/s",
        inter="50GB/s",
        flops="500TFLOPS",
        global_batch=2048,
    )
    assert time.process_time() - begin < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 0.5e6  # kB
    assert advice.recommended.candidate.layout.world_size == 16384
    assert advice.recommended.memory.total < 0.92 * 80 * GB
    assert {"one device", "plain DDP", "one node"} & set(advice.baselines) == {"one device"}
    assert advice.evaluated + advice.cut > 1000


def test_auto_uses_the_whole_world_where_advice_would_be_to_stay():
    tiny = Layers(4, 1000, 2000, saved=100, kept=50, received=10)
    arguments = {"memory": "40GB", "intra": "100GB/s", "flops": "100TFLOPS"}
    assert advise(tiny.profile(), devices=8, **arguments).recommended.candidate.layout.world_size == 1
    advice = choose_layout(tiny.profile(), 8, **arguments)
    assert advice.recommended.candidate.layout.world_size == 8
    assert advice.recommended.candidate.strategy_arguments()["layout"] == str(advice.recommended.candidate.layout)


def test_auto_raises_with_what_to_do():
    with pytest.raises(ValueError, match=r"can't choose a layout for 8 ranks: the link inside a node is not known"):
        choose_layout(LAYERS.profile(), 8, memory="80GB", flops="100TFLOPS")
    with pytest.raises(ValueError, match="Nothing fits"):
        choose_layout(LAYERS.profile(), 2, memory="1GB", intra="100GB/s", flops="100TFLOPS")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"devices": 0}, "devices=0 does not fit"),
        ({"devices": 12, "devices_per_node": 8}, "devices=12 does not fit devices_per_node=8: give whole nodes"),
        ({"devices": 2, "memory": "lots"}, "memory='lots' does not fit: write a number and a unit"),
        ({"devices": 2, "intra": "0GB/s"}, "intra='0GB/s' does not fit: give more than zero"),
        ({"devices": 2, "flops": "1.2.3T"}, "flops='1.2.3T' does not fit"),
        ({"devices": 2, "global_batch": 0}, "global_batch=0 does not fit"),
        ({"devices": 2, "links": "no/links.json"}, "links='no/links.json' can't be read"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(arguments, sentence):
    with pytest.raises(ValueError) as error:
        advise(LAYERS.profile(), **arguments)
    assert sentence in str(error.value)
