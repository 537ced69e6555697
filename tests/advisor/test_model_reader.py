"""What is read from a module, against numbers written out by hand."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_dist import ModelPlan
from lightning_dist.advisor.model_reader import build_on_meta, measure_optimizer, read_model
from lightning_dist.parallel.expert import MixtureOfExperts
from tests.advisor import models


def read(factory, **arguments):
    module, batch = build_on_meta(factory)
    return read_model(module, batch, **arguments)


def test_plain_matrices_by_hand():
    profile = read(models.mlp)
    assert (profile.samples, profile.chain_length, profile.unknown) == (8, 4, "")
    for layer in profile.layers[:4]:
        assert layer.parameters.total == 64 * 64 + 64 == layer.trainable.total
        assert layer.forward.total == 2 * 64 * 64  # each sample
        assert layer.backward.total == 2 * layer.forward.total
        assert layer.sent == 64 * 4
    # a layer keeps its input (which for later layers is the ReLU's output of the one before)
    assert sum(layer.saved.total for layer in profile.layers[:4]) == 5 * 64 * 4
    assert profile.layers[1].received.total == 64 * 4
    assert profile.optimizer_bytes == 0
    assert "Sequential has no tensor-parallel plan" in profile.refused["tensor"]


@pytest.mark.parametrize(
    ("optimizer", "bytes_each"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4),
        (lambda p: torch.optim.AdamW(p), 8),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 12),
        (lambda p: {"optimizer": torch.optim.RMSprop(p, momentum=0.5), "lr_scheduler": None}, 8),
        (lambda p: ([torch.optim.Adagrad(p)], []), 4),
    ],
)
def test_optimizer_state_is_measured(optimizer, bytes_each):
    module = nn.Linear(2, 2)
    module.configure_optimizers = lambda: optimizer(module.parameters())
    assert measure_optimizer(module) == (bytes_each, [])


def test_an_optimizer_that_cannot_be_made_is_assumed_and_said():
    bytes_each, notes = measure_optimizer(nn.Linear(2, 2))
    assert bytes_each == 8 and "assumed" in notes[0]


def test_a_llama_layer_by_hand():
    profile = read(lambda: models.llama(
        length=256, samples=2, vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2,
    ))  # fmt: skip
    embed, layer, like = profile.layers[0], profile.layers[1], profile.layers[3]
    matrices = 2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 96
    assert layer.parameters.cut == matrices and layer.parameters.whole == 2 * 64
    attention = 4 * 64 * 256 * 256 / 2  # causal
    assert layer.forward.total == pytest.approx(2 * matrices * 256 + attention)
    assert layer.forward.whole == 0
    assert layer.backward.total == pytest.approx(4 * matrices * 256 + 2.5 * attention)
    hidden = 256 * 64 * 4
    # two sums in forward (behind attention and the MLP), two in backward, each the hidden states
    assert (layer.reduced, layer.reductions) == (2 * hidden, 2)
    assert (layer.reduced_backward, layer.reductions_backward) == (2 * hidden, 2)
    assert (layer.query, layer.key_value) == (hidden, 2 * hidden / 4)
    assert layer.sent == layer.received.total == hidden
    assert (embed.parameters.cut, embed.reduced) == (64000, hidden)
    assert (profile.query_heads, profile.key_value_heads) == (8, 2)
    same = ("forward", "saved", "kept", "received", "reduced", "operations", "largest", "sent")
    assert all(getattr(layer, name) == getattr(like, name) for name in same)
    assert profile.refused_tensor_sizes[3].endswith("its 8 heads do not divide by 3; sizes that fit: 1, 2, 4, 8")
    assert 2 not in profile.refused_tensor_sizes


def test_what_a_layer_keeps_is_what_autograd_keeps():
    """On real tensors, without the shortcut for like layers."""
    sizes = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4)
    profile = read(lambda: models.llama(length=16, samples=2, **sizes))
    module, batches = models.llama(length=16, samples=2, **sizes)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage, storage.nbytes()
        return tensor

    module.log = lambda *arguments: None
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module.training_step(batches[0], 0)
    assert loss.requires_grad
    assert profile.whole.saved.total * 2 == pytest.approx(sum(size for _, size in saved.values()), rel=0.01)


def test_frozen_weights_get_no_gradient_and_half_the_backward():
    class Frozen(models.Mlp):
        def __init__(self):
            super().__init__()
            self.blocks[1].requires_grad_(False)

    profile = read(lambda: (Frozen(), [torch.zeros(8, 64)]))
    frozen, trained = profile.layers[1], profile.layers[2]
    assert frozen.trainable.total == 0 and frozen.parameters.total == trained.parameters.total
    assert frozen.backward.total == frozen.forward.total == trained.backward.total / 2


def test_mixed_precision_keeps_copies_of_weights():
    profile = read(models.mlp, precision="bf16-mixed")
    assert [layer.cast.total for layer in profile.layers[:4]] == [64 * 64 + 64] * 4
    assert profile.layers[1].saved.total == 64 * 2  # activations are half as wide


class Mixture(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MixtureOfExperts(16, 24, num_experts=4, top_k=2) for _ in range(2))

    def training_step(self, batch, batch_idx):
        for layer in self.layers:
            batch = layer(batch)
        return batch.mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_experts_count_the_tokens_they_get(precision):
    profile = read(lambda: (Mixture(), [torch.zeros(3, 5, 16)]), precision=precision)
    layer = profile.layers[0]
    assert profile.num_experts == 4 and "expert" not in profile.refused
    assert layer.experts.total == 4 * 3 * 16 * 24
    assert layer.parameters.total == 4 * 16  # the router
    # 5 tokens a sample go through 2 experts of three matrices each, and the router sees them once
    assert layer.forward.total == pytest.approx(5 * 2 * 2 * 3 * 16 * 24 + 5 * 2 * 4 * 16)
    assert layer.routed == 5 * 2 * 16 * (4 if precision == "32-true" else 2)


def test_hugging_face_experts():
    profile = read(models.mixtral, precision="bf16-true")
    assert profile.num_experts == 8 and not profile.unknown
    layer = profile.layers[1]
    assert layer.experts.total == 8 * 3 * 4096 * 14336
    assert layer.routed == 4096 * 2 * 4096 * 2


def test_tied_weights_are_counted_once():
    profile = read(models.gpt2)
    module, _ = models.gpt2()
    assert profile.num_parameters == sum(parameter.numel() for parameter in module.parameters())


def test_a_step_that_needs_values_leaves_activations_unknown():
    class Chooses(models.Mlp):
        def training_step(self, batch, batch_idx):
            return self.blocks(batch[batch.sum(1) > 0]).mean()

    profile = read(lambda: (Chooses(), [torch.zeros(8, 64)]))
    assert "training_step can't be traced without values" in profile.unknown
    assert profile.num_parameters == 4 * (64 * 64 + 64)


def test_what_fails_behind_the_network_is_noted_only():
    class Fails(models.Mlp):
        def training_step(self, batch, batch_idx):
            out = self.blocks(batch)
            return out[out > 0].nonzero().sum()

    profile = read(lambda: (Fails(), [torch.zeros(8, 64)]))
    assert not profile.unknown and "blocks.3" in profile.notes[0]


def test_without_a_batch_activations_are_unknown():
    notes = []
    module, batch = build_on_meta(models.Mlp, notes.append)
    profile = read_model(module, batch)
    assert profile.unknown and profile.samples is None
    assert "train_dataloader() gave no batch" in notes[0]


def test_a_factory_that_needs_memory_is_called_again_and_said():
    def factory():
        module = models.Mlp()
        assert module.blocks[0][0].weight[0, 0].item() != 7
        return module, [torch.zeros(8, 64)]

    notes = []
    module, _ = build_on_meta(factory, notes.append)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert "can't run on the meta device" in notes[0]


def test_wrong_factories_and_precisions_are_named():
    with pytest.raises(ValueError, match="returned a str"):
        build_on_meta(lambda: "model")
    with pytest.raises(ValueError, match="The iterable of batches is empty"):
        build_on_meta(lambda: (models.Mlp(), []))
    with pytest.raises(ValueError, match="precision='fp8' does not fit"):
        read(models.mlp, precision="fp8")


def test_manual_optimization_refuses_pipelines():
    class Manual(models.Mlp):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def parallel_plan(self):
            return ModelPlan(tensor={self.name: "colwise"})

        name = "0.0"

    profile = read(lambda: (Manual(), [torch.zeros(8, 64)]))
    assert "manual optimization" in profile.refused["pipeline"] and "tensor" not in profile.refused
    Manual.name = "nowhere"
    with pytest.raises(ValueError, match="The tensor plan names 'nowhere'"):
        read(lambda: (Manual(), [torch.zeros(8, 64)]))
