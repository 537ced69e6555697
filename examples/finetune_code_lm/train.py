"""Fine-tunes a causal language model on source code, sharded over several processes by lightning_dist."""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from transformers import PreTrainedModel

from data import ByteTokenizer, CodeData, PretrainedTokenizer, Tokenizer
from lightning_dist import HybridParallelStrategy, ParallelLayout
from lightning_dist.callbacks import FaultTolerantCheckpoint
from lightning_dist.checkpoint import consolidate, load_huggingface
from lightning_dist.testing.faults import FaultAt
from module import CodeLanguageModel, load_pretrained, small_llama


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument_group("what to train").add_argument
    add(
        "--data", type=Path, nargs="+", default=[], metavar="PATH", help="text files, folders; else Python's own source"
    )
    add(
        "--model",
        metavar="DIR",
        help="a folder with a Hugging Face causal language model, or 'smollm2'; else a small one",
    )
    add("--hidden-size", type=int, default=128, help="of the small Llama, a multiple of 32 (%(default)s)")
    add("--layers", type=int, default=2, help="of the small Llama (%(default)s)")
    add("--context-length", type=int, default=256, help="tokens in a window (%(default)s)")

    add = parser.add_argument_group("how to train it").add_argument
    add("--epochs", type=int, default=3, help="epochs to train, with --resume epochs more (%(default)s)")
    add("--steps-per-epoch", type=int, default=100, help="steps between validations and checkpoints (%(default)s)")
    add("--batch-size", type=int, default=16, help="windows in a step, over all devices (%(default)s)")
    add("--learning-rate", type=float, help="AdamW's (2e-3 for random weights, 5e-5 for pretrained ones)")
    add("--validation-windows", type=int, default=256, help="windows to validate on, at most (%(default)s)")
    add("--seed", type=int, default=1, help="of the weights and of the order of windows (%(default)s)")

    add = parser.add_argument_group("where to train it").add_argument
    add("--layout", help="sizes of the kinds of parallelism, such as 'replicate=2' (shard=DEVICES)")
    add("--strategy", choices=["hybrid", "ddp", "auto"], default="hybrid", help="ddp and auto are plain Lightning")
    add("--devices", type=int, help="processes on each node (every GPU, else 2 CPU processes)")
    add("--nodes", type=int, default=1, help="nodes of a cluster that Lightning knows (%(default)s)")
    add("--precision", help="Lightning's name for it (bf16-mixed on GPUs, else 32-true)")

    add = parser.add_argument_group("what comes of it").add_argument
    add("--output", type=Path, default=Path("runs/finetune_code_lm"), help="where each run gets a folder (%(default)s)")
    add(
        "--resume",
        nargs="?",
        const="newest",
        metavar="CHECKPOINT",
        help="go on from it, or from the newest in --output",
    )
    add("--survive", action="store_true", help="save every 10 steps, and go on from the newest in --output")
    add("--kill-at", type=int, metavar="STEP", help="kill rank 1 before that step, once, to see --survive at work")
    add("--prompt", default="def ", help="what the sample at the end begins with (%(default)r)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    # The windows are in memory, so no workers are needed to load them; the other one is Lightning's about itself.
    warnings.filterwarnings("ignore", ".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(arguments.seed, verbose=False)
    try:
        devices, nodes, layout = place(arguments)
        resume_from = find_checkpoint(arguments)
        network, tokenizer = build(arguments, weights=arguments.strategy != "hybrid")
        data = CodeData(
            arguments.data,
            tokenizer,
            context_length=arguments.context_length,
            batch_size=batch_size_per_rank(arguments.batch_size, layout.data_size),
            validation_windows=arguments.validation_windows,
            seed=arguments.seed,
        )
        # The one line that lightning_dist asks for.
        strategy = HybridParallelStrategy(layout=str(layout)) if arguments.strategy == "hybrid" else arguments.strategy
        if any(parameter.is_meta for parameter in network.parameters()):
            load_huggingface(network, arguments.model)  # when each rank has its part of the network: that part only
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from None
    module = CodeLanguageModel(network, learning_rate=arguments.learning_rate or (5e-5 if arguments.model else 2e-3))

    run = resume_from.parents[1].name if resume_from else None
    logger = TensorBoardLogger(arguments.output, name="", version=run)
    newest: ModelCheckpoint = ModelCheckpoint(filename="newest-epoch{epoch:03d}", auto_insert_metric_name=False)
    if arguments.survive:
        newest = FaultTolerantCheckpoint(arguments.output / "checkpoints", every_n_train_steps=10, save_top_k=0)
    best = ModelCheckpoint(filename="best-epoch{epoch:03d}", monitor="val/bits_per_byte", auto_insert_metric_name=False)
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        num_nodes=nodes,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        precision=arguments.precision or ("bf16-mixed" if torch.cuda.is_available() else "32-true"),
        max_epochs=arguments.epochs + finished_epochs(resume_from),
        limit_train_batches=arguments.steps_per_epoch,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=logger,
        callbacks=[newest, best, LearningRateMonitor("step"), TQDMProgressBar(refresh_rate=10), *faults(arguments)],
    )
    trainer.print(f"Data: {data.description}")
    trainer.print(f"Model: {type(network).__name__}, {network.num_parameters() / 1e6:.1f} M parameters")
    trainer.print(f"Devices: {trainer.world_size}, strategy {arguments.strategy}, layout {layout}")

    checkpoint = str(resume_from) if resume_from else None
    before = trainer.validate(module, data, ckpt_path=checkpoint, verbose=False)[0]["val/bits_per_byte"]
    trainer.print(f"Before: {before:.3f} bits per byte" + (f" (from {checkpoint})" if checkpoint else ""))
    start = time.perf_counter()
    trainer.fit(module, data, ckpt_path="last" if arguments.survive else checkpoint)
    after = float(trainer.callback_metrics["val/bits_per_byte"])
    trainer.print(f"After: {after:.3f} bits per byte, step {trainer.global_step}, {time.perf_counter() - start:.0f} s")

    if trainer.is_global_zero:
        folder = Path(logger.log_dir) / "model"
        checkpoint = newest.last_model_path or newest.best_model_path
        save_model(Path(checkpoint), arguments, folder)
        print(f"Sample:\n{sample(folder, arguments.prompt, arguments.seed)}\n")
        print(f"Checkpoint (go on with --resume): {checkpoint}")
        print(f"Model (for transformers, or for --model): {folder}")
        print(f"Logs: tensorboard --logdir {arguments.output}")


def faults(arguments: argparse.Namespace) -> list[FaultAt]:
    """What is to go wrong: a killed process, in the first start of the run only."""
    return [FaultAt(step=arguments.kill_at, rank=1, action="kill")] if arguments.kill_at is not None else []


def place(arguments: argparse.Namespace) -> tuple[int, int, ParallelLayout]:
    """Devices per node, nodes, and the layout of all of them."""
    layout = ParallelLayout.parse(arguments.layout or "")
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun has started the processes and knows
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    else:
        devices, nodes = arguments.devices or default_devices(layout), arguments.nodes
    if arguments.strategy != "hybrid":
        if arguments.layout:
            raise ValueError(f"--layout {arguments.layout} is for --strategy hybrid, not {arguments.strategy}.")
        layout = ParallelLayout(replicate=devices * nodes)
    return devices, nodes, layout.resolve(devices * nodes)


def default_devices(layout: ParallelLayout) -> int:
    """Every GPU of this machine, or two CPU processes, or what the layout asks for where that does not fit."""
    available = torch.cuda.device_count() or 2
    needed = layout.minimum_world_size
    fits = available == needed or (layout.shard == "auto" and available % needed == 0)
    return available if fits else needed


def batch_size_per_rank(batch_size: int, data_size: int) -> int:
    """The windows of one data rank, out of those of a step."""
    if batch_size % data_size:
        raise ValueError(f"--batch-size {batch_size} does not divide into {data_size} equal parts, one per data rank.")
    return batch_size // data_size


def find_checkpoint(arguments: argparse.Namespace) -> Path | None:
    """The checkpoint that ``--resume`` names or, without a name, the newest of the newest run in ``--output``."""
    if arguments.resume is None:
        return None
    if arguments.resume == "newest":
        candidates = list(arguments.output.glob("version_*/checkpoints/newest-epoch*.ckpt"))
        if not candidates:
            raise ValueError(f"--resume: {arguments.output} holds no checkpoint yet; run once without --resume.")
        found = max(candidates, key=lambda path: (run_number(path), finished_epochs(path)))
    else:
        found = Path(arguments.resume).resolve()
        finished_epochs(found)
    if found.is_dir() != (arguments.strategy == "hybrid"):
        written_by = "hybrid" if found.is_dir() else "ddp or auto"
        raise ValueError(f"--resume: {found} was written with --strategy {written_by}; go on with that.")
    return found


def run_number(checkpoint: Path) -> int:
    """The number of the run that wrote a checkpoint, by its folder."""
    return int(checkpoint.parents[1].name.removeprefix("version_"))


def finished_epochs(checkpoint: Path | None) -> int:
    """How many epochs a checkpoint has behind it, by its name."""
    if checkpoint is None:
        return 0
    epoch = re.search(r"epoch(\d+)", checkpoint.name)
    if epoch is None or not checkpoint.exists():
        raise ValueError(f"--resume {checkpoint}: that is no checkpoint of this example (…/newest-epoch002.ckpt).")
    return int(epoch[1]) + 1


def build(arguments: argparse.Namespace, weights: bool = True) -> tuple[PreTrainedModel, Tokenizer]:
    """The model to start from and its tokenizer; that of a folder with or without its weights."""
    if arguments.model:
        return load_pretrained(arguments.model, weights)
    size = {"hidden_size": arguments.hidden_size, "layers": arguments.layers}
    return small_llama(ByteTokenizer.vocabulary_size, arguments.context_length, **size), ByteTokenizer()


def save_model(checkpoint: Path, arguments: argparse.Namespace, folder: Path) -> None:
    """Writes the trained weights as one Hugging Face model folder."""
    network, tokenizer = build(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        whole = checkpoint
        if checkpoint.is_dir():  # each rank has written its own part
            whole = Path(temporary) / "whole.ckpt"
            consolidate(checkpoint, whole)
        weights = torch.load(whole, map_location="cpu", weights_only=True)["state_dict"]
    CodeLanguageModel(network).load_state_dict(weights)
    network.save_pretrained(folder)
    if isinstance(tokenizer, PretrainedTokenizer):
        tokenizer.tokenizer.save_pretrained(folder)


def sample(folder: Path, prompt: str, seed: int) -> str:
    """What the model in ``folder`` writes after ``prompt``."""
    torch.manual_seed(seed)
    network, tokenizer = load_pretrained(str(folder))
    tokens = torch.from_numpy(tokenizer.encode(prompt)[0])[None].long()
    written = network.eval().generate(  # type: ignore[operator]
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=200,
        do_sample=True,
        temperature=0.7,
        eos_token_id=tokenizer.end_of_text,
        pad_token_id=tokenizer.end_of_text,
    )
    return tokenizer.decode(written[0].tolist())


if __name__ == "__main__":
    main()
