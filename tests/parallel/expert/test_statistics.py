"""Router statistics count each choice once, on one process and on all ranks together."""

import pytest
import torch

from lightning_dist import ParallelLayout
from lightning_dist.parallel.activation import checkpoint_activations
from lightning_dist.parallel.expert import RouterStatistics, find_experts, watch_routing
from tests.parallel.expert.compare import own_part, spread
from tests.parallel.expert.networks import batch_for, build, force_routing


def test_statistics_of_known_choices():
    statistics = RouterStatistics(4)
    statistics.update(torch.tensor([[0, 1], [0, 4]]), exchanged_bytes=7)
    statistics.update(torch.tensor([[0, 2]]), exchanged_bytes=5)
    found = statistics.compute()
    assert found["load"].tolist() == pytest.approx([0.6, 0.2, 0.2, 0.0])
    entropy = torch.distributions.Categorical(found["load"]).entropy() / torch.tensor(4.0).log()
    assert found["entropy"].item() == pytest.approx(entropy.item(), rel=1e-5)
    assert found["max_over_mean"].item() == pytest.approx(2.4)
    assert found["drop_rate"].item() == pytest.approx(1 / 6)
    assert (found["tokens"].item(), found["exchanged_bytes"].item()) == (3, 12)


def test_even_load_has_entropy_one_and_no_tokens_have_none():
    statistics = RouterStatistics(4)
    assert statistics.compute()["entropy"].item() == 0
    statistics.update(torch.arange(8).view(4, 2) % 4)
    assert statistics.compute()["entropy"].item() == pytest.approx(1)


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_recomputation_and_evaluation_are_not_counted(mode):
    """A load doubled by recomputation was reported for torchtitan (#1593, #1304)."""
    network = build()
    checkpoint_activations(network.blocks, mode)
    watched = watch_routing(network, find_experts(network))
    states = set(network.state_dict())
    for microbatch in range(2):
        network(*batch_for(microbatch)).backward()
    with torch.no_grad():
        network.eval()(*batch_for(2))
    for statistics in watched.values():
        found = statistics.compute()
        assert (found["tokens"].item(), found["drop_rate"].item()) == (80, 0)
    assert states == set(build().state_dict())


def counted_over_ranks():
    layout = ParallelLayout.parse("shard=2,ep=2")
    network = build(capacity_factor=0.8)
    names = find_experts(network)
    watch_alone = build(capacity_factor=0.8)
    alone = watch_routing(watch_alone, names, sync_on_compute=False)
    spread(network, layout.resolve(2), blocks=network.blocks)
    watched = watch_routing(network, names)
    for each in (network, watch_alone):
        force_routing(each, "skewed", 0)
    network(*own_part(batch_for(0), layout.resolve(2))).backward()
    watch_alone(*batch_for(0)).backward()
    own_bytes = watched[names[0]].exchanged_bytes.item()
    return [
        {key: value.tolist() for key, value in metrics[names[0]].compute().items()} for metrics in (watched, alone)
    ] + [own_bytes]


def test_all_ranks_together_count_what_one_process_counts(pool):
    first, second = pool.run(counted_over_ranks, 2)
    assert first[:2] == second[:2]
    found, alone = first[0], first[1]
    # Rows of 8 doubles: each choice whose expert is on the other rank travels there and back.
    assert found.pop("exchanged_bytes") == first[2] + second[2] > 0
    assert alone.pop("exchanged_bytes") == 0
    assert found.pop("exchange_seconds") > 0 == alone.pop("exchange_seconds")
    for name, value in alone.items():
        assert found[name] == pytest.approx(value), name
    assert found["drop_rate"] > 0
