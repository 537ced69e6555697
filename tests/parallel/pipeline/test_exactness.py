"""Each way in which a pipeline could train on silently wrong numbers is either right or refused by name."""

from __future__ import annotations

from functools import partial

import pytest

from lightning_dist.parallel.pipeline import plan_pipeline
from lightning_dist.parallel.pipeline.trace import Trace, Tracer
from lightning_dist.plan.chain import find_chain
from lightning_dist.testing import WorkerError, WorkerPool
from tests.parallel.pipeline import awkward, huggingface, networks
from tests.parallel.pipeline.harness import assert_same, train_pipeline, train_reference, train_schedules
from tests.parallel.pipeline.networks import CHAIN, language_step, token_batches

BOTH_BACKWARDS = ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")

RIGHT = [
    "Network",  # code in front of, between and behind the chain's modules; a parameter outside it
    "PairNetwork",  # dictionaries with tuples, integer tensors and numbers across the cut
    "InPlaceBetween",
    "ViewNetwork",
    "CheckpointedCalls",
    "TiedNetwork",
    "LooseParameters",
    "FrozenFirstStage",
    "FrozenLastStage",
    "TwiceUsed",
]


@pytest.mark.parametrize("kind", RIGHT)
def test_right(pool: WorkerPool, kind: str) -> None:
    factory = partial(awkward.build, kind)
    batches = token_batches([8, 8, 5])
    reference = train_reference(factory, language_step, batches)
    ranks = pool.run(
        train_schedules, 2, factory, language_step, batches, CHAIN, schedules=BOTH_BACKWARDS, layout="pp=2", timeout=90
    )
    for schedule in BOTH_BACKWARDS:
        assert_same([rank[schedule] for rank in ranks], reference)


def test_a_parameter_used_outside_its_module_when_the_plan_shares_it(pool: WorkerPool) -> None:
    factory = partial(awkward.build, "SharedUse")
    batches = token_batches([8, 8])
    reference = train_reference(factory, language_step, batches)
    ranks = pool.run(
        train_schedules, 2, factory, language_step, batches, CHAIN[:-1],
        schedules=BOTH_BACKWARDS, layout="pp=2", shared=["model.embed.weight"], timeout=90,
    )  # fmt: skip
    for schedule in BOTH_BACKWARDS:
        assert_same([rank[schedule] for rank in ranks], reference)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TiedNetwork", "LooseParameters"])
def test_shared_parameters_with_shards(pool: WorkerPool, kind: str) -> None:
    """Also where a V puts both ends of a tie on one rank."""
    factory = partial(awkward.build, kind)
    batches = token_batches([8, 8, 8])
    reference = train_reference(factory, language_step, batches, accumulate=2)
    ranks = pool.run(
        train_schedules, 4, factory, language_step, batches, CHAIN,
        schedules=("1F1B", "ZBVZeroBubble"), layout="pp=2,shard=2", accumulate=2, timeout=120,
    )  # fmt: skip
    for schedule in ranks[0]:
        assert_same([rank[schedule] for rank in ranks], reference)


REFUSED = {
    "SkipConnection": r"output of model.embed .* reaches model.blocks.5",
    "EncoderToEveryBlock": r"output of model.embed .* reaches model.blocks.3",
    "SkipToResult": r"result.* model.embed |output of model.embed .* result",
    "SkipThroughAttribute": r"output of model.embed .* reaches model.blocks.5",
    "CalledTwice": r"model.blocks.0 is called more than once",
    "OtherOrder": r"model.blocks.5",
    "NotCalled": r"model.blocks.5 is not called before model.head|another order than the chain's.*model.head",
    "ForeignParameterUsed": r"model.embed.weight is used directly",
    "ValueRead": r"output of model.embed are read on the host",
    "WritesInto": r"output of model.embed .*(is|or) written into another tensor",
    "GradientInside": r"calls torch.autograd.grad",
}


QUICKLY = ("SkipThroughAttribute", "ForeignParameterUsed", "ValueRead")


def traced(kind: str, chain: list[str]) -> Trace:
    return Tracer(awkward.build(kind), chain).trace(language_step, token_batches([8])[0])


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_anything_runs(kind: str) -> None:
    chain = CHAIN[:-1] if kind == "ForeignParameterUsed" else CHAIN
    sentence = traced(kind, chain).find_refusal(plan_pipeline(chain, 2))
    assert sentence is not None
    with pytest.raises(RuntimeError, match=REFUSED[kind]):
        raise RuntimeError(sentence)


@pytest.mark.parametrize(
    "kind", [*QUICKLY, *(pytest.param(kind, marks=pytest.mark.slow) for kind in REFUSED if kind not in QUICKLY)]
)
def test_refused_while_it_runs_where_it_was_not_traced(pool: WorkerPool, kind: str) -> None:
    chain = CHAIN[:-1] if kind == "ForeignParameterUsed" else CHAIN
    with pytest.raises(WorkerError, match=f"PipelineError: .*({REFUSED[kind]})"):
        pool.run(
            train_pipeline, 2, partial(awkward.build, kind), language_step, token_batches([8]), chain, "1F1B", "pp=2",
            timeout=60,
        )  # fmt: skip


def test_reentrant_checkpoint_of_a_stages_last_module_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="use_reentrant=False"):
        pool.run(
            train_pipeline, 2, partial(awkward.build, "ReentrantCalls"), language_step, token_batches([8]), CHAIN,
            timeout=60,
        )  # fmt: skip


@pytest.mark.parametrize("kind", [*RIGHT, "RandomPrefix", "DropoutNetwork"])
def test_what_is_right_is_not_refused(kind: str) -> None:
    trace = traced(kind, CHAIN)
    assert trace.incomplete is None
    assert trace.calls == list(range(len(CHAIN)))
    assert trace.find_refusal(plan_pipeline(CHAIN, 4)) is None


def test_a_skip_that_stays_on_its_stage_is_not_refused() -> None:
    plan = plan_pipeline(CHAIN, 2, sizes=[7, 1])
    assert traced("SkipConnection", CHAIN).find_refusal(plan) is None


def test_tracing_leaves_the_module_alone_and_counts_work() -> None:
    module = awkward.build("DropoutNetwork")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    trace = Tracer(module, CHAIN).trace(language_step, token_batches([8])[0])
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())
    assert type(module.model.embed).__call__ is type(module).__call__
    # a linear map of n rows from i to o costs 2·n·i·o operations; 8 samples of 5 tokens
    assert trace.flops == {0: 0, **{1 + block: 40 * 2 * (8 * 16 + 16 * 8) for block in range(6)}, 7: 40 * 2 * 8 * 11}


EXACT = ("bert", "llama_classifier")


@pytest.mark.parametrize(
    "family",
    [
        "llama_tied",
        "gemma3",
        "bert",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "qwen3", "gpt2", "llama_classifier")),
    ],
)
def test_hugging_face_models_unchanged(pool: WorkerPool, family: str) -> None:
    """To 1e-6 where the library computes the loss in float32 by itself: all its causal models."""
    factory = partial(huggingface.build, family)
    batches = huggingface.batches(family, [6, 6, 5])
    chain = find_chain(factory()).names
    reference = train_reference(factory, huggingface.step, batches)
    ranks = pool.run(
        train_schedules, 2, factory, huggingface.step, batches, chain,
        schedules=("1F1B", "ZBVZeroBubble"), layout="pp=2", timeout=90,
    )  # fmt: skip
    for schedule in ranks[0]:
        assert_same([rank[schedule] for rank in ranks], reference, 1e-9 if family in EXACT else 1e-6)


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(family, marks=pytest.mark.slow) for family in ("llama", "qwen3"))]
)
def test_hugging_face_models_with_a_loss_in_float64(pool: WorkerPool, family: str) -> None:
    factory = partial(huggingface.build, family)
    batches = huggingface.batches(family, [6, 6])
    reference = train_reference(factory, huggingface.exact_step, batches)
    ranks = pool.run(
        train_pipeline, 2, factory, huggingface.exact_step, batches, find_chain(factory()).names, timeout=60
    )
    assert_same(ranks, reference)


@pytest.mark.parametrize("network", ["plain_sequential", "encoder_classifier"])
def test_plain_torch_networks(pool: WorkerPool, network: str) -> None:
    factory = getattr(networks, network)
    batches = networks.labelled_batches(network, [6, 6, 5])
    reference = train_reference(factory, networks.classification_step, batches)
    ranks = pool.run(
        train_schedules, 2, factory, networks.classification_step, batches, find_chain(factory()).names,
        schedules=BOTH_BACKWARDS, layout="pp=2", timeout=90,
    )  # fmt: skip
    for schedule in BOTH_BACKWARDS:
        assert_same([rank[schedule] for rank in ranks], reference)
