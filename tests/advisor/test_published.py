"""Published training configurations: where they stand in the ranking, and their memory. Sources in docs/ADVISOR.md."""

from dataclasses import replace

import pytest

from lightning_dist.advisor import Candidate, Cluster, Link, search
from lightning_dist.advisor.estimator import Estimator
from lightning_dist.advisor.model_reader import build_on_meta, read_model
from lightning_dist.advisor.profile import Amount, with_sequence_parallel
from lightning_dist.layout import ParallelLayout
from tests.advisor import models

pytestmark = pytest.mark.slow

INTERLEAVED = ("1F1B", "Interleaved1F1B")
H100 = Cluster(16384, 8, 80e9, Link(450e9, 5e-6), Link(50e9, 15e-6), flops=500e12)


def profile_of(factory):
    """With what those runs had: FSDP2's mixed precision, sequence parallelism, and a loss on sharded logits."""
    module, batch = build_on_meta(factory)
    profile = with_sequence_parallel(read_model(module, batch, precision="bf16-gathered"))
    loss = profile.layers[-1]
    loss = replace(
        loss,
        gathered=0.0,
        saved=Amount(cut=loss.saved.total),
        kept=Amount(cut=loss.kept.total),
        received=Amount(cut=loss.received.total),
        largest=Amount(cut=loss.largest.total),
    )
    return replace(profile, layers=(*profile.layers[:-1], loss))


def llama_70b():
    return models.llama(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llama_405b():
    return profile_of(models.llama_405b)


def ranking(profile, cluster, global_batch):
    """Meshes (tensor, context, pipeline), the fastest first, each with its best estimate."""
    meshes = {}
    for estimate in search.search(profile, cluster, global_batch, INTERLEAVED).fitting:
        layout = estimate.candidate.layout
        meshes.setdefault((layout.tensor, layout.context, layout.pipeline), estimate)
    return meshes


@pytest.mark.parametrize(("devices", "place"), [(16384, 1), (8192, 2)])
def test_llama_3_405b_is_in_the_top_three(llama_405b, devices, place):
    """Tensor 8, pipeline 16; 16 million tokens a step, sequences of 8,192, no context parallelism."""
    profile = replace(llama_405b, refused={**llama_405b.refused, "context": "the run did not use it"})
    meshes = ranking(profile, H100.of_size(devices), 2048)
    assert list(meshes).index((8, 1, 16)) + 1 == place


def test_the_published_rate_follows_from_more_stages_on_each_rank(llama_405b):
    """Interleaved1F1B has two stages on each rank here; with eight, one layer each, the bubble is a quarter."""
    layout = ParallelLayout.parse("pp=16,shard=128,tp=8").resolve(16384)
    time = Estimator(llama_405b, H100).time(Candidate(layout, 2, "selective", "Interleaved1F1B", 16, 1))
    work = (llama_405b.whole.forward.total + llama_405b.whole.backward.total) * 2048 / 16384
    eight_stages = time.total - time.bubble + time.bubble * 2 / 8
    assert work / time.total / 1e12 == pytest.approx(291, abs=3)
    assert work / eight_stages / 1e12 == pytest.approx(400, rel=0.05)  # published


@pytest.mark.parametrize(
    ("factory", "layout", "candidate", "reserved", "error"),
    [
        (models.llama_8b, "shard=8", (3, "selective", None, 1, 2), 82.4, 0.13),
        (models.llama_8b, "shard=128", (3, "selective", None, 1, 2), 67.0, 0.18),
        (lambda: models.llama_8b(32768), "shard=8", (3, "full", None, 1, 1), 83.9, -0.11),
        (llama_70b, "shard=32,tp=8", (3, "full", None, 1, 16), 71.9, -0.26),
        (models.llama_405b, "pp=8,shard=8,tp=8", (2, "full", "Interleaved1F1B", 32, 1), 72.7, -0.23),
        (models.llama_405b, "pp=8,shard=8,tp=8", (2, "full", "1F1B", 32, 1), 82.5, -0.35),
    ],
)
def test_torchtitans_memory(factory, layout, candidate, reserved, error):
    """GiB that torchtitan saw reserved; the error is that of docs/ADVISOR.md."""
    layout = ParallelLayout.parse(layout)
    layout = layout.resolve(layout.minimum_world_size)
    estimator = Estimator(profile_of(factory), H100.of_size(layout.world_size))
    predicted = estimator.memory(Candidate(layout, *candidate)).total / 2**30
    assert predicted / reserved - 1 == pytest.approx(error, abs=0.015)
