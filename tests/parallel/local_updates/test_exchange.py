"""Updates lose nothing for good on their way, and are limited as they should be."""

import pytest
import torch
import torch.distributed as dist

from lightning_dist.parallel.local_updates import UpdateExchange, add_noise, clip_update, takes_part


def send_rounds(compression, rounds):
    """Sums over all rounds, in float64: of what was sent, of what was meant, and the largest single update."""
    rank = dist.get_rank()
    exchange = UpdateExchange(dist.group.WORLD, compression)
    sent, meant, largest, first = 0.0, 0.0, 0.0, 0.0
    for number in range(rounds):
        updates = []
        for worker in range(2):
            generator = torch.Generator().manual_seed(10 * number + worker)
            updates.append([torch.randn(30, 11, generator=generator).double(), torch.randn(5, generator=generator)])
        weights = [3.0, 1.0]
        mean = exchange.mean(updates[rank], weights)
        wanted = [(3 * one.double() + two.double()) / 4 for one, two in zip(*updates, strict=True)]
        sent = sent + torch.cat([tensor.double().flatten() for tensor in mean])
        meant = meant + torch.cat([tensor.flatten() for tensor in wanted])
        largest = max(largest, *(float(tensor.abs().max()) for update in updates for tensor in update))
        first = first or float((sent - meant).abs().max())
    return float((sent - meant).abs().max()), first, largest, mean[1].dtype


@pytest.mark.parametrize(("compression", "one_rounding"), [("none", 1e-6), ("bf16", 2**-8), ("int8", 1 / 254)])
def test_what_is_lost_in_a_round_comes_with_the_next(pool, compression, one_rounding):
    """After 50 rounds no more is missing than one rounding of one update takes away: errors do not add up."""
    for missing, first, largest, dtype in pool.run(send_rounds, 2, compression, 50):
        assert missing < 1.2 * one_rounding * largest
        assert compression == "none" or first > 1e-4
        assert dtype == torch.float32


def test_clipping_bounds_the_norm_of_all_tensors_together():
    update = [torch.full((3,), 2.0), torch.full((1,), -2.0)]
    assert [tensor.tolist() for tensor in clip_update(update, 1.0)] == [[0.5, 0.5, 0.5], [-0.5]]
    assert all(torch.equal(one, two) for one, two in zip(clip_update(update, 5.0), update, strict=True))
    assert torch.equal(clip_update([torch.zeros(2)], 1.0)[0], torch.zeros(2))


def test_noise_has_the_deviation_it_should_have():
    noise = add_noise([torch.zeros(200_000)], 0.3, torch.Generator().manual_seed(0))[0]
    assert float(noise.std()) == pytest.approx(0.3, rel=0.01)
    assert abs(float(noise.mean())) < 0.004


def test_a_share_of_workers_is_drawn_alike_by_all():
    drawn = [[worker for worker in range(8) if takes_part(0.25, number, worker, 8, seed=3)] for number in range(200)]
    assert all(len(workers) == 2 for workers in drawn)
    counts = [sum(worker in workers for workers in drawn) for worker in range(8)]
    assert min(counts) > 30
    assert takes_part(0.01, 0, 0, 1, seed=3)
    assert [takes_part(lambda number, worker: worker == number, 2, worker, 4, 0) for worker in range(4)] == [
        False, False, True, False,
    ]  # fmt: skip
