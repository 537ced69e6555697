"""LocalUpdateStrategy: its rounds by hand, what is sent, unequal workers, checkpoints."""

import copy
import os
import warnings
from functools import partial

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset

from lightning_dist.strategies import LocalUpdateStrategy
from lightning_dist.testing import WorkerError
from tests.strategies.sharded_training import quiet
from tests.strategies.test_data_axes import global_steps
from tests.strategies.training import Classifier, MaskedClassifier, data, make, masked_data, reference, worst

SLOW_MO = partial(torch.optim.SGD, lr=0.9, momentum=0.6)
FED_ADAM = partial(torch.optim.Adam, lr=0.05)


class Sends(TorchDispatchMode):
    """Copies every tensor that is given to a collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[torch.Tensor] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.sent += [leaf.detach().clone() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        return function(*args, **(kwargs or {}))


class Watched(Classifier):
    """Records what is sent from the first training step to the last, and what must not be."""

    def __init__(self) -> None:
        super().__init__()
        self.secrets: list[torch.Tensor] = []
        self.sends = Sends()

    def on_train_start(self):
        self.sends.__enter__()

    def on_train_end(self):
        self.sends.__exit__(None, None, None)

    def training_step(self, batch, batch_idx):
        activation = self.model.embed(batch[0])
        self.secrets += [batch[0].clone(), activation.detach().clone(), self.model(batch[0]).detach().clone()]
        self.log("loss", self.loss(batch), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Reporting(Classifier):
    """Logs, validates in the middle of a round, and notes the weights that validation saw."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.seen: list[torch.Tensor] = []
        self.trained = 0

    def training_step(self, batch, batch_idx):
        self.trained += len(batch[1])
        self.log("mean", batch[0].mean(), on_step=True, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.seen.append(nn.utils.parameters_to_vector(self.parameters()).detach().clone())
        self.log("val_loss", self.loss(batch))


class Plain(Classifier):
    """SGD without momentum: the mean of steps is the step of the mean for any weights."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class PlainMasked(MaskedClassifier, Plain):
    pass


class WithStatistics(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))


class StopsAlone(Plain):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1:
            raise ArithmeticError("worker 1 is out of paper")
        return super().training_step(batch, batch_idx)


class SaveAt(L.Callback):
    def __init__(self, step: int, path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class NoteStart(L.Callback):
    """What a worker goes on from."""

    def on_train_start(self, trainer, pl_module):
        self.weights = {name: value.clone() for name, value in pl_module.state_dict().items()}
        self.place = (trainer.strategy.rounds, trainer.strategy.steps_in_round)
        self.momentum = [s["momentum_buffer"].clone() for s in trainer.optimizers[0].state.values() if s]


def shares(samples: int, sizes: list[int]):
    """Each worker's own samples, one after the other."""
    whole, start, parts = data(samples), 0, []
    for size in sizes:
        parts.append(Subset(whole, range(start, start + size)))
        start += size
    return parts


def train(factory, parts, batch_size, *, validation=None, save_at=None, ckpt_path=None, settings=None, **kwargs):
    """Fits on this worker with its own part of the data; what the run did."""
    warnings.simplefilter("ignore")
    rank = int(os.environ["RANK"])
    module = make(factory, seed=rank)  # Workers that begin unequal are made equal.
    start = NoteStart()
    callbacks = [start] + ([SaveAt(*save_at)] if save_at else [])
    strategy = LocalUpdateStrategy(timeout=30.0, **(settings or {}))
    run = quiet(devices=len(parts), strategy=strategy, callbacks=callbacks, **kwargs)
    loader = DataLoader(parts[rank], batch_size)
    held_out = DataLoader(validation, batch_size) if validation is not None else None
    run.fit(module, loader, held_out, ckpt_path=ckpt_path)
    metrics = LocalUpdateStrategy.worker_metrics_callback(run)
    watch = getattr(module, "sends", None)
    return {
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "steps": run.global_step,
        "rounds": strategy.rounds,
        "start": (start.weights, start.place, start.momentum),
        "metrics": {name: float(value) for name, value in run.callback_metrics.items()},
        "by_worker": metrics.values if metrics is not None else {},
        "seen": getattr(module, "seen", None),
        "trained": getattr(module, "trained", None),
        "sent": watch.sent if watch is not None else None,
        "secrets": getattr(module, "secrets", None),
    }


def fit(pool, factory, parts, batch_size, **kwargs):
    return pool.run(train, len(parts), factory, parts, batch_size, init_process_group=False, **kwargs)


def by_hand(factory, parts, batch_size, inner_steps, outer, epochs=1, by="samples", takes_part=None):
    """The rounds of all workers, one after the other in one process."""
    module = make(factory).double()
    workers = [copy.deepcopy(module) for _ in parts]
    optimizers = [worker.configure_optimizers() for worker in workers]
    common = [parameter.detach().clone() for parameter in module.parameters()]
    outer = outer(common)
    rounds, history = 0, []
    for _ in range(epochs):
        loaders = [list(DataLoader(part, batch_size)) for part in parts]
        for first in range(0, max(map(len, loaders)), inner_steps):
            weights, updates = [], []
            for number, (worker, optimizer) in enumerate(zip(workers, optimizers, strict=True)):
                batches = loaders[number][first : first + inner_steps]
                if takes_part is not None and not takes_part(rounds, number):
                    batches = []
                for batch in batches:
                    optimizer.zero_grad()
                    worker.loss(batch).backward()
                    optimizer.step()
                samples = sum(len(batch[1]) for batch in batches)
                weights.append(samples if by == "samples" else int(samples > 0))
                updates.append([p.detach() - c for p, c in zip(worker.parameters(), common, strict=True)])
            if sum(weights):
                for place, weight in enumerate(common):
                    mean = sum(w * update[place] for w, update in zip(weights, updates, strict=True)) / sum(weights)
                    weight.grad = -mean
                outer.step()
            for worker in workers:
                for parameter, weight in zip(worker.parameters(), common, strict=True):
                    parameter.data.copy_(weight)
            rounds += 1
            history.append(nn.utils.parameters_to_vector(common).clone())
    return {name: weight for (name, _), weight in zip(module.named_parameters(), common, strict=True)}, history


AVERAGE = partial(torch.optim.SGD, lr=1.0)
NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.cluster)])
def test_one_step_averages_are_one_process(pool, world):
    """With momentum too: every worker's momentum is the mean's share. Batch i of worker r is every world-th sample."""
    dataset = data(24 * world)
    wanted, _ = reference(make(Classifier), global_steps(dataset, 2, world))
    parts = [Subset(dataset, range(rank, len(dataset), world)) for rank in range(world)]
    for result in fit(pool, Classifier, parts, 2):
        assert worst(result["weights"], wanted) < 1e-9


def test_ragged_batches_count_by_their_samples(pool):
    """Workers have 5 and 4 samples of the last batch's 9, in windows of two batches."""
    dataset = data(41)
    wanted, _ = reference(make(Plain), global_steps(dataset, 3, 2, accumulate=2))
    parts = [Subset(dataset, range(rank, 41, 2)) for rank in range(2)]
    for result in fit(pool, Plain, parts, 3, accumulate_grad_batches=2):
        assert worst(result["weights"], wanted) < 1e-9


def test_loss_weight_counts(pool):
    dataset = masked_data([3, 1, 0, 2, 3, 3, 1, 0], 3)
    wanted, _ = reference(make(PlainMasked), global_steps(dataset, 3, 2))
    parts = [Subset(dataset, range(rank, len(dataset), 2)) for rank in range(2)]
    for result in fit(pool, PlainMasked, parts, 3):
        assert worst(result["weights"], wanted) < 1e-9


@pytest.mark.parametrize(
    ("outer", "factory"),
    [("average", AVERAGE), ("nesterov", NESTEROV), (SLOW_MO, SLOW_MO), (FED_ADAM, FED_ADAM)],
)
def test_outer_steps(pool, outer, factory):
    """Two epochs of unequal workers: 9, 4 and 2 batches, in rounds of 4, the last one short."""
    parts = shares(60, [36, 15, 7])
    wanted, _ = by_hand(Classifier, parts, 4, 4, factory, epochs=2)
    results = fit(pool, Classifier, parts, 4, max_epochs=2, settings={"inner_steps": 4, "outer": outer})
    for result in results:
        assert worst(result["weights"], wanted) < 1e-9
        assert (result["steps"], result["rounds"]) == (18, 6)


def test_equal_workers(pool):
    parts = shares(40, [28, 9])
    wanted, _ = by_hand(Classifier, parts, 4, 3, AVERAGE, by="equal")
    for result in fit(pool, Classifier, parts, 4, settings={"inner_steps": 3, "weight_by": "equal"}):
        assert worst(result["weights"], wanted) < 1e-9


def odd_rounds_without_worker_1(round_number, worker):
    return worker != 1 or round_number % 2 == 0


def nobody_in_round_1(round_number, worker):
    return round_number != 1


@pytest.mark.parametrize("participation", [odd_rounds_without_worker_1, nobody_in_round_1])
def test_a_worker_drops_out_for_a_round(pool, participation):
    parts = shares(48, [24, 24])
    wanted, _ = by_hand(Classifier, parts, 3, 2, NESTEROV, takes_part=participation)
    settings = {"inner_steps": 2, "outer": "nesterov", "participation": participation}
    for result in fit(pool, Classifier, parts, 3, settings=settings):
        assert worst(result["weights"], wanted) < 1e-9


def test_batch_statistics_are_averaged(pool):
    one, two = fit(pool, WithStatistics, shares(32, [16, 16]), 4, settings={"inner_steps": 2})
    assert torch.equal(one["weights"]["model.1.running_mean"], two["weights"]["model.1.running_mean"])
    assert one["weights"]["model.1.running_mean"].abs().max() > 0
    assert worst(one["weights"], two["weights"]) == 0


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_only_updates_leave_a_worker(pool):
    """In training every tensor of a collective is a round's number or update, or at the epoch's end what was logged."""
    parts = shares(32, [16, 16])
    results = fit(pool, Watched, parts, 2, settings={"inner_steps": 4})
    size = sum(value.numel() for value in results[0]["weights"].values())
    for result in results:
        updates = [tensor for tensor in result["sent"] if tensor.numel() == size]
        rest = [tensor for tensor in result["sent"] if tensor.numel() != size]
        # In a round, one update and one number of each worker.
        assert len(updates) == 2
        secret = torch.cat([tensor.flatten() for tensor in result["secrets"]])
        assert secret.numel() > 100
        for tensor in updates + [tensor for tensor in rest if tensor.is_floating_point()]:
            assert not torch.isin(tensor.flatten(), secret).any()
        # What is logged goes as pickled dictionaries, padded by nothing: a batch of float64 would not fit beside names.
        assert sum(tensor.numel() for tensor in rest if tensor.is_floating_point()) <= 20
        pickled = [tensor.numel() for tensor in rest if tensor.dtype == torch.uint8]
        assert pickled and max(pickled) < 200


def test_the_recorder_sees_what_a_careless_module_sends(pool):
    results = fit(pool, Careless, shares(32, [16, 16]), 2, settings={"inner_steps": 4})
    secret = torch.cat([tensor.flatten() for tensor in results[0]["secrets"]])
    assert any(torch.isin(t.flatten(), secret).any() for t in results[0]["sent"] if t.is_floating_point())


class Careless(Watched):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        dist.all_reduce(batch[0])
        return loss


# --- workers of different sizes, and metrics --------------------------------------------------------------------------


def test_metrics_of_each_worker_and_of_all(pool):
    """Means that are logged count samples alike, over workers that have 5 and 2 batches."""
    parts = shares(29, [20, 7])
    results = fit(pool, Reporting, parts, 4, settings={"inner_steps": 2})
    rows = [torch.stack([part[i][0] for i in range(len(part))]) for part in parts]
    means = [float(x.mean()) for x in rows]
    for rank, result in enumerate(results):
        assert result["trained"] == len(parts[rank])
        assert result["metrics"]["mean_epoch"] == pytest.approx(float(torch.cat(rows).mean()), rel=1e-6)
        assert result["by_worker"]["mean"] == pytest.approx(means, rel=1e-6)


def test_validation_sees_the_weights_of_the_last_round(pool):
    """After steps 2, 4 and 6 in rounds of 4: the initial weights, the first round's, and the last, short one's."""
    parts = shares(36, [18, 18])
    _, history = by_hand(Reporting, parts, 3, 4, AVERAGE)
    settings = {"inner_steps": 4}
    results = fit(pool, Reporting, parts, 3, validation=data(6, seed=5), settings=settings, val_check_interval=2)
    start = nn.utils.parameters_to_vector(make(Reporting).double().parameters())
    wanted = [start, start, *history]  # The sanity check first.
    for result in results:
        assert len(result["seen"]) == 4
        for seen, weights in zip(result["seen"], wanted, strict=True):
            assert torch.allclose(seen, weights, rtol=0, atol=1e-12)


def test_a_run_that_ends_in_a_round_closes_it(pool):
    parts = shares(36, [18, 18])
    wanted, _ = by_hand(Classifier, [Subset(part, range(15)) for part in parts], 3, 4, AVERAGE)
    for result in fit(pool, Classifier, parts, 3, max_steps=5, settings={"inner_steps": 4}):
        assert worst(result["weights"], wanted) < 1e-9
        assert result["rounds"] == 2


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_resume_is_bit_equal(pool, tmp_path):
    """Outer and inner momentum, and what int8 has not sent yet, come back."""
    parts = shares(36, [20, 13])
    settings = {"inner_steps": 3, "outer": "nesterov", "compression": "int8"}
    straight = fit(pool, Classifier, parts, 4, max_epochs=3, settings=settings)
    file = tmp_path / "one.ckpt"
    fit(pool, Classifier, parts, 4, max_epochs=2, settings=settings, save_at=(10, file))
    resumed = fit(pool, Classifier, parts, 4, max_epochs=3, settings=settings, ckpt_path=file)
    for one, two in zip(straight, resumed, strict=True):
        assert worst(one["weights"], two["weights"]) == 0
        assert two["steps"] == 15


def test_a_checkpoint_in_a_round(pool, tmp_path):
    """The file has the common weights; each worker goes on from its own."""
    parts = shares(48, [24, 24])
    file = tmp_path / "middle.ckpt"
    settings = {"inner_steps": 3}
    fit(pool, Classifier, parts, 4, max_steps=5, settings=settings, save_at=(4, file))
    saved = torch.load(file, weights_only=True)
    _, history = by_hand(Classifier, [Subset(part, range(12)) for part in parts], 4, 3, AVERAGE)
    module = make(Classifier).double()
    module.load_state_dict(saved["state_dict"])
    assert torch.allclose(nn.utils.parameters_to_vector(module.parameters()), history[0], rtol=0, atol=1e-12)
    resumed = fit(pool, Classifier, parts, 4, max_steps=5, settings=settings, ckpt_path=file)
    starts = [result["start"] for result in resumed]
    for rank, (weights, place, momentum) in enumerate(starts):
        own = torch.load(f"{file}.worker-{rank}", weights_only=True)
        assert place == (1, 1)
        assert all(torch.equal(weights[name], own["weights"][name]) for name in weights)
        kept = own["optimizer_states"][0]["state"]
        assert all(torch.equal(m, kept[i]["momentum_buffer"]) for i, m in enumerate(momentum))
    assert worst(starts[0][0], starts[1][0]) > 0


def test_another_number_of_workers_goes_on_from_the_common_weights(pool, tmp_path):
    file = tmp_path / "two.ckpt"
    two = fit(pool, Classifier, shares(24, [12, 12]), 4, settings={"inner_steps": 3}, save_at=(3, file))
    three = fit(pool, Classifier, shares(24, [8, 8, 8]), 4, max_epochs=2, settings={"inner_steps": 3}, ckpt_path=file)
    for result in three:
        assert worst(result["start"][0], two[0]["weights"]) == 0


def test_files_of_different_checkpoints_are_refused(pool, tmp_path):
    for name in ("one", "two"):
        fit(pool, Classifier, shares(24, [12, 12]), 4, save_at=(3, tmp_path / name))
    (tmp_path / "two.worker-1").replace(tmp_path / "one.worker-1")
    with pytest.raises(WorkerError, match=r"one.worker-1 was not saved with"):
        fit(pool, Classifier, shares(24, [12, 12]), 4, max_epochs=2, ckpt_path=tmp_path / "one")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"inner_steps": 0}, "inner_steps=0 does not fit"),
        ({"outer": "adam"}, "outer='adam' does not fit"),
        ({"weight_by": "size"}, "weight_by='size' does not fit"),
        ({"compression": "fp8"}, "compression='fp8' does not fit"),
        ({"clip_update": -1.0}, "clip_update=-1.0 does not fit"),
        ({"noise_multiplier": 1.0}, "give clip_update"),
        ({"noise_multiplier": 1.0, "clip_update": 1.0}, "give weight_by='equal'"),
        ({"participation": 0.0}, "participation=0.0 does not fit"),
    ],
)
def test_arguments_that_do_not_fit(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        LocalUpdateStrategy(**settings)


def test_a_worker_without_data_is_named_on_all(pool):
    with pytest.raises(WorkerError, match=r"Workers \[1\] have no batch"):
        fit(pool, Plain, shares(12, [12, 0]), 4)


def test_a_worker_that_fails_is_named_by_the_others(pool):
    with pytest.raises(WorkerError, match="worker 1 is out of paper"):
        fit(pool, StopsAlone, shares(24, [12, 12]), 3, settings={"inner_steps": 4})


def test_split_again_by_lightnings_sampler(pool):
    with pytest.raises(WorkerError, match="use_distributed_sampler=False"):
        fit(pool, Plain, shares(24, [12, 8]), 4, use_distributed_sampler=True)


def test_batch_statistics_do_not_go_without_noise(pool):
    settings = {"clip_update": 1.0, "noise_multiplier": 1.0, "weight_by": "equal"}
    with pytest.raises(WorkerError, match="batch statistics"):
        fit(pool, WithStatistics, shares(8, [8]), 4, settings=settings)
