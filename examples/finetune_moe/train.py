"""Trains a small mixture of experts on source code, its experts spread over several processes by lightning_dist."""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import TensorBoardLogger

from data import ByteTokenizer, CodeData
from lightning_dist import HybridParallelStrategy, ParallelLayout
from lightning_dist.callbacks import RouterHealth
from module import HEAD_SIZE, ExpertLanguageModel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], metavar="PATH", help="text files, folders; else Python's source")
    add("--hidden-size", type=int, default=128, help="a multiple of 32 (%(default)s)")
    add("--layers", type=int, default=2, help="blocks of attention and experts (%(default)s)")
    add("--experts", type=int, default=8, help="in each block, of which a token goes to two (%(default)s)")
    add("--context-length", type=int, default=256, help="tokens in a window (%(default)s)")
    add("--epochs", type=int, default=2, help="epochs to train (%(default)s)")
    add("--steps-per-epoch", type=int, default=100, help="steps between validations (%(default)s)")
    add("--batch-size", type=int, default=16, help="windows in a step, over all devices (%(default)s)")
    add("--learning-rate", type=float, default=2e-3, help="AdamW's (%(default)s)")
    add("--validation-windows", type=int, default=256, help="windows to validate on, at most (%(default)s)")
    add("--seed", type=int, default=1, help="of the weights and of the order of windows (%(default)s)")
    add("--layout", default="ep=2", help="such as 'ep=2', 'shard=4,ep=2', 'tp=2,ep=2', 'shard=1' (%(default)s)")
    add("--devices", type=int, help="processes (as many as the layout needs)")
    add("--output", type=Path, default=Path("runs/finetune_moe"), help="where each run gets a folder (%(default)s)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", ".*does not have many workers.*|.*LeafSpec.*")
    L.seed_everything(arguments.seed, verbose=False)
    try:
        devices, layout = place(arguments)
        data = CodeData(
            arguments.data,
            ByteTokenizer(),
            context_length=arguments.context_length,
            batch_size=arguments.batch_size // layout.data_size,
            validation_windows=arguments.validation_windows,
            seed=arguments.seed,
        )
    except ValueError as error:
        raise SystemExit(f"train.py: {error}") from None
    module = ExpertLanguageModel(
        ByteTokenizer.vocabulary_size,
        arguments.context_length,
        arguments.hidden_size,
        arguments.layers,
        arguments.experts,
        arguments.learning_rate,
    )
    trainer = L.Trainer(
        strategy=HybridParallelStrategy(layout=str(layout)),
        devices=devices,
        accelerator="cuda" if torch.cuda.is_available() else "cpu",
        precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
        max_epochs=arguments.epochs,
        limit_train_batches=arguments.steps_per_epoch,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        logger=TensorBoardLogger(arguments.output, name=""),
        callbacks=[ModelCheckpoint(), RouterHealth(every_n_steps=10), TQDMProgressBar(refresh_rate=10)],
    )
    size = sum(parameter.numel() for parameter in module.parameters())
    trainer.print(f"Data: {data.description}")
    trainer.print(f"Model: {arguments.layers} x {arguments.experts} experts, {size / 1e6:.1f} M parameters")
    trainer.print(f"Devices: {trainer.world_size}, layout {layout}")
    before = trainer.validate(module, data, verbose=False)[0]["val/bits_per_byte"]
    trainer.print(f"Before: {before:.3f} bits per byte")
    start = time.perf_counter()
    trainer.fit(module, data)
    after = float(trainer.callback_metrics["val/bits_per_byte"])
    trainer.print(f"After: {after:.3f} bits per byte, step {trainer.global_step}, {time.perf_counter() - start:.0f} s")
    trainer.print(f"Logs: tensorboard --logdir {arguments.output}")


def place(arguments: argparse.Namespace) -> tuple[int, ParallelLayout]:
    """Devices, and the layout of all of them."""
    layout = ParallelLayout.parse(arguments.layout)
    started = os.environ.get("LOCAL_WORLD_SIZE")  # by torchrun, on one node
    devices = int(started) if started else arguments.devices or layout.minimum_world_size
    layout = layout.resolve(devices)
    if arguments.batch_size % layout.data_size:
        raise ValueError(
            f"--batch-size {arguments.batch_size} does not divide into {layout.data_size} equal parts, one per data"
            " rank."
        )
    if arguments.hidden_size % HEAD_SIZE:
        raise ValueError(f"--hidden-size {arguments.hidden_size} is no multiple of {HEAD_SIZE}.")
    return devices, layout


if __name__ == "__main__":
    main()
