"""Models of all kinds, each an ordinary LightningModule, train on two stages to one process's weights."""

from functools import partial

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from lightning_dist.parallel.pipeline.microbatches import count_samples, even_sizes, split_batch
from tests.parallel.pipeline import huggingface, networks
from tests.strategies.test_pipeline_training import Batches, fit, together
from tests.strategies.training import make, worst

MICROBATCHES = 4
NETWORKS = {
    "nn.Sequential": ("plain_sequential", networks.plain_sequential),
    "nn.TransformerEncoder": ("encoder_classifier", networks.encoder_classifier),
    "residual": ("residual_network", networks.residual_network),
}


class Module(L.LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.model = NETWORKS[kind][1]().model if kind in NETWORKS else huggingface.model(kind)

    def loss(self, batch):
        if self.kind in NETWORKS:
            return F.cross_entropy(self.model(batch[0]), batch[1])
        return self.model(**batch).loss

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def one_process(module, batches):
    """The mean over the same microbatches, which only batch statistics notice."""
    module = module.double().train()
    optimizer = module.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        samples = count_samples(batch)
        sizes = even_sizes(samples, MICROBATCHES)
        for part, size in zip(split_batch(batch, sizes), sizes, strict=True):
            (module.loss(part) * (size / samples)).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


HUGGING_FACE = ["llama_tied", "gpt2", "gemma3", "bert"]
MORE = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "qwen3", "llama_classifier")]


@pytest.mark.parametrize("kind", [*NETWORKS, *HUGGING_FACE, *MORE])
def test_trains_unchanged_on_two_stages(pool, kind):
    """Hugging Face computes its loss in float32."""
    if kind in NETWORKS:
        batches = networks.labelled_batches(NETWORKS[kind][0], [8, 8, 5])
    else:
        batches = huggingface.batches(kind, [8, 8, 5])
    factory = partial(Module, kind)
    wanted = one_process(make(factory), batches)
    results = pool.run(fit, 2, "pp=2", factory, Batches(batches), init_process_group=False, timeout=120)
    weights = together(results)
    assert worst({name: weights[name] for name in wanted}, wanted) < (1e-9 if kind in NETWORKS else 1e-6)
