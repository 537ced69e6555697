"""A Hugging Face folder is one line in ``configure_model``, whatever the layout, and no rank holds the whole of it."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_dist.checkpoint import load_huggingface
from lightning_dist.parallel import meta
from lightning_dist.testing import WorkerError
from tests.parallel.tensor.models import hugging_face
from tests.strategies.test_data_axes import global_steps
from tests.strategies.test_pipeline_axis import sizes
from tests.strategies.training import InOrder, full_state, reference, trainer, worst

SETTINGS = {
    "llama": {"tie_word_embeddings": True, "num_key_value_heads": 1, "num_hidden_layers": 4},
    "gpt2": {},
    "mixtral": {},
}


class FromFolder(L.LightningModule):
    """As a user writes it: the network on the meta device, its weights from a folder."""

    def __init__(self, folder, experts=None):
        super().__init__()
        self.folder, self.experts = folder, experts
        self.model = None

    def configure_model(self):
        from transformers import AutoConfig, AutoModelForCausalLM

        if self.model is None:
            config = AutoConfig.from_pretrained(self.folder)
            config._experts_implementation = self.experts
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(config)
            load_huggingface(self.model, self.folder)

    def loss(self, batch):
        ids, _ = batch
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Whole(FromFolder):
    """The same with all weights at hand."""

    def __init__(self, network):
        super().__init__(folder=None)
        self.model = network


def tokens(samples):
    ids = torch.randint(0, 128, (samples, 9), generator=torch.Generator().manual_seed(4))
    return torch.utils.data.TensorDataset(ids, torch.zeros(samples))


def fit(layout, folder, experts):
    dataset = tokens(16)
    run = trainer(layout, use_distributed_sampler=False)
    module = FromFolder(folder, experts)
    loader = DataLoader(dataset, 4, sampler=InOrder(dataset, run.strategy))
    run.validate(module, loader, verbose=False)  # a module that is made parallel before fit keeps its weights
    run.fit(module, loader)
    return full_state(module)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", "shard=1"),
        ("llama", "shard=2"),
        ("llama", "tp=2"),
        ("llama", "pp=2"),
        pytest.param("llama", "pp=2,tp=2", marks=pytest.mark.cluster),
        ("gpt2", "tp=2"),
        ("mixtral", "shard=2,ep=2"),
    ],
)
def test_every_layout_trains_on_from_the_folder(pool, tmp_path, kind, layout):
    """Weights tied across stages, one key/value head for two ranks, experts stored one by one."""
    network = hugging_face(kind, **SETTINGS[kind])
    network.save_pretrained(tmp_path)
    world, data_ranks = sizes(layout)
    wanted, _ = reference(Whole(network), global_steps(tokens(16), 4, data_ranks))
    experts = "eager" if kind == "mixtral" else None
    states = pool.run(fit, world, layout, str(tmp_path), experts, init_process_group=False, timeout=120)
    merged = {name: value for state in states for name, value in state.items()}
    assert worst(merged, wanted) < (1e-6 if kind == "mixtral" else 1e-9)  # its router computes in float32


def test_what_does_not_fit_is_said_before_anything_has_memory(pool, tmp_path):
    hugging_face("gpt2").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        (tmp_path / "config.json").read_text().replace('"n_embd": 64', '"n_embd": 32')
    )
    with pytest.raises(WorkerError, match=r"c_attn.weight \(64, 192\) in the file, \(32, 96\) in the network"):
        pool.run(fit, 2, "tp=2", str(tmp_path), None, init_process_group=False)


def memory_given(layout, folder):
    """Bytes of parameters that this rank ever gave memory to."""
    given = 0
    own = meta.materialise

    def count(module, *args, **kwargs):
        nonlocal given
        empty = {id(p) for p in module.parameters() if p.is_meta}
        own(module, *args, **kwargs)
        if empty:
            local = {id(p): p.to_local() if hasattr(p, "to_local") else p for p in module.parameters()}
            given = max(given, sum(p.numel() * p.element_size() for p in local.values()))

    meta.materialise = count
    try:
        trainer(layout, max_steps=1).fit(FromFolder(folder), DataLoader(tokens(4), 4))
    finally:
        meta.materialise = own
    return given


def test_layers_of_a_folder_are_cut_before_they_have_memory(pool, tmp_path):
    """C38: under tensor parallelism, where a network with weights of its own is built whole on every rank."""
    network = hugging_face("llama", num_hidden_layers=4)
    network.save_pretrained(tmp_path)
    whole = sum(p.numel() * p.element_size() for p in network.parameters())
    for given in pool.run(memory_given, 2, "tp=2", str(tmp_path), init_process_group=False):
        assert 0 < given < 0.6 * whole
