"""The main example, as a user runs it: real processes, real files."""

import argparse
import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lightning_dist.checkpoint import is_checkpoint

FOLDER = Path(__file__).parents[2] / "examples" / "finetune_code_lm"
CONTEXT = 64
WINDOWS = 64
STEPS = 25
# A single file is cut, and its last twentieth validates: exactly 64 windows, each 63 tokens on from the one before.
VALIDATION_CHARACTERS = WINDOWS * (CONTEXT - 1)
SMALL = f"--hidden-size 64 --layers 1 --context-length {CONTEXT} --steps-per-epoch {STEPS} --batch-size 8".split()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "source.txt"
    source = Path(argparse.__file__).read_text().encode("ascii", "ignore").decode()
    path.write_text(source[: 20 * VALIDATION_CHARACTERS])
    assert len(path.read_text()) == 20 * VALIDATION_CHARACTERS
    return path


def train(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, FOLDER / "train.py", *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def bits_per_byte(output: str) -> tuple[float, float]:
    """Before and after, as printed."""
    before, after = (re.search(rf"{word}: ([0-9.]+) bits per byte", output) for word in ("Before", "After"))
    assert before and after, output
    return float(before[1]), float(after[1])


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    """The (step, value) pairs of each tag in a run's TensorBoard files."""
    events = EventAccumulator(str(run))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def runs(text, tmp_path_factory):
    """One epoch under shard=2, then one more from its checkpoint: their outputs and the folder of the run."""
    folder = tmp_path_factory.mktemp("runs")
    options = [*SMALL, "--data", text, "--epochs", 1, "--output", folder]
    first = train(*options)
    after_first = scalars(folder / "version_0")
    model = folder / "version_0" / "model"
    kept = model.rename(folder / "model_of_the_first_epoch")
    return first, after_first, kept, train(*options, "--resume"), folder / "version_0"


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_training_lowers_bits_per_byte_and_shows_what_it_does(runs):
    output, logged, _, _, run = runs
    before, after = bits_per_byte(output)
    assert 7.5 < before < 8.5  # 264 equally likely tokens: log2(264) = 8.04
    assert after < before - 1.5
    assert "Devices: 2, strategy hybrid, layout shard=2" in output
    sample = output.partition("Sample:\n")[2].partition("Checkpoint")[0]
    assert sample.startswith("def ") and len(sample) > 50
    assert is_checkpoint(run / "checkpoints" / "newest-epoch000.ckpt")
    assert is_checkpoint(run / "checkpoints" / "best-epoch000.ckpt")
    assert {"train/loss", "val/bits_per_byte", "lr-AdamW", "epoch"} <= set(logged)
    assert [step for step, _ in logged["train/loss"]] == [9, 19]
    steps, values = zip(*logged["val/bits_per_byte"], strict=True)
    assert steps == (0, STEPS - 1)
    assert values == pytest.approx((before, after), abs=6e-4)


@pytest.mark.slow
def test_bits_per_byte_are_all_bits_over_all_bytes(runs, text):
    """The printed value again, from the written model and the bytes of the file."""
    output, _, folder, _, _ = runs
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    held_out = [*text.read_bytes()[-VALIDATION_CHARACTERS:], 256]
    bits = 0.0
    for start in range(0, VALIDATION_CHARACTERS, CONTEXT - 1):
        window = torch.tensor([held_out[start : start + CONTEXT]])
        with torch.no_grad():
            logits = model(window).logits
        bits += float(F.cross_entropy(logits[0, :-1], window[0, 1:], reduction="sum")) / math.log(2)
    # The first byte is only seen, and the end of the text is no byte.
    assert bits_per_byte(output)[1] == pytest.approx(bits / (VALIDATION_CHARACTERS - 1), abs=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_resuming_continues_as_if_never_stopped(runs, text, tmp_path):
    first, _, _, second, run = runs
    assert bits_per_byte(second)[0] == bits_per_byte(first)[1]
    assert f"step {2 * STEPS}," in second
    assert (run / "checkpoints" / "newest-epoch001.ckpt").is_dir()
    logged = scalars(run)
    assert [step for step, _ in logged["train/loss"]] == [9, 19, 29, 39, 49]
    # The other way to the same end: plain Lightning, two epochs in one go.
    output = train(*SMALL, "--data", text, "--epochs", 2, "--output", tmp_path, "--strategy", "ddp")
    assert bits_per_byte(second)[1] == pytest.approx(bits_per_byte(output)[1], abs=2e-3)
    losses = dict(scalars(tmp_path / "version_0")["train/loss"])
    assert dict(logged["train/loss"]) == pytest.approx(losses, rel=1e-4)


def trained_tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import ByteLevelBPETokenizer

    tokenizer = ByteLevelBPETokenizer()
    texts = ["def f(x):\n    return x + 1\n" * 20, "for name in names:\n    print(name)\n" * 20]
    tokenizer.train_from_iterator(texts, vocab_size=300, special_tokens=["<|end|>"], show_progress=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<|end|>")


@pytest.mark.slow
def test_a_model_folder_with_its_tokenizer_is_fine_tuned_and_written_back(text, tmp_path):
    tokenizer = trained_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "given")
    tokenizer.save_pretrained(tmp_path / "given")
    options = "--context-length 64 --epochs 1 --steps-per-epoch 5 --batch-size 4 --learning-rate 0.01 --devices 1"
    output = train("--model", tmp_path / "given", "--data", text, *options.split(), "--output", tmp_path)
    before, after = bits_per_byte(output)
    assert after < before
    written = tmp_path / "version_0" / "model"
    assert json.loads((written / "config.json").read_text())["vocab_size"] == len(tokenizer)
    assert AutoTokenizer.from_pretrained(written).decode(tokenizer("return x").input_ids) == "return x"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp=2", pytest.param("pp=2", marks=pytest.mark.cluster)])
def test_a_model_folder_goes_in_and_out_under_a_layout_with_one_devices_numbers(text, tmp_path, layout):
    """Two heads over two processes, or two layers; each reads its part of the folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "given")
    settings = "--context-length 64 --epochs 1 --steps-per-epoch 5 --batch-size 4 --learning-rate 0.01"
    options = [*settings.split(), "--model", tmp_path / "given", "--data", text, "--validation-windows", 16]
    alone = train(*options, "--strategy", "auto", "--devices", 1, "--output", tmp_path / "alone")
    assert bits_per_byte(alone)[1] < bits_per_byte(alone)[0]
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "alone" / "version_0" / "model").state_dict()
    output = train(*options, "--layout", layout, "--output", tmp_path / layout)
    assert f"Devices: 2, strategy hybrid, layout {layout}" in output
    assert bits_per_byte(output) == pytest.approx(bits_per_byte(alone), abs=1.1e-3)
    written = AutoModelForCausalLM.from_pretrained(tmp_path / layout / "version_0" / "model").state_dict()
    assert all(torch.allclose(value, wanted[name], atol=1e-4) for name, value in written.items())


@pytest.mark.slow
def test_the_module_keeps_its_numbers_under_a_layout():
    command = [Path(sys.executable).parent / "lightning-dist", "verify", "small:factory", "--layout"]
    done = subprocess.run(
        [*command, "replicate=2,shard=2", "--steps", "3", "--json"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["same"] and report["world_size"] == 4
    assert len(report["losses"]) == 3


@pytest.fixture
def data(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("data")
    for name in ("data", "module", "train"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--batch-size 3", "--batch-size 3 does not divide into 2 equal parts, one per data rank."),
        ("--data no_such_file", "--data no_such_file: there is no such file or folder."),
        ("--model no_such_folder", "--model no_such_folder: give 'smollm2' or a folder with a Hugging Face model"),
        ("--output no_such_folder --resume", "--resume: no_such_folder holds no checkpoint yet"),
        ("--strategy ddp --layout shard=2", "--layout shard=2 is for --strategy hybrid, not ddp."),
    ],
)
def test_wrong_use_is_told_in_one_sentence(arguments, sentence, monkeypatch, tmp_path, data):
    script = importlib.import_module("train")
    monkeypatch.setattr(script.L, "seed_everything", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments.split()])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=re.escape(sentence)):
        script.main()


def test_files_are_split_the_same_way_everywhere(data, tmp_path):
    for number in range(40):
        (tmp_path / f"file_{number:02}.py").write_text(f"number = {number}\n")
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / ".hidden").write_text("not read")
    texts = data.read_texts(data.find_files([tmp_path]))
    assert len(texts) == 40
    training, validation = data.split_by_file(texts)
    assert (len(training), len(validation)) == (38, 2)
    assert not set(training) & set(validation)
    backwards = dict(reversed(texts.items()))
    assert data.split_by_file(backwards) == (training, validation)


def test_pythons_own_source_is_found_without_its_tests(data):
    names = [name for name, _ in data.find_files([])]
    assert len(names) > 200
    assert any(name.endswith("/argparse.py") for name in names)
    assert not any("/test/" in name or "site-packages" in name for name in names)


def test_every_token_but_the_first_is_predicted_once(data):
    windows = data.WindowDataset(["abcdefghij", "klm"], data.ByteTokenizer(), context_length=4)
    tokens = [*b"abcdefghij", 256, *b"klm", 256]
    predicted = [token for window in windows for token in window["labels"][1:].tolist()]
    assert predicted == tokens[1 : 1 + len(predicted)]
    assert len(predicted) == 12  # the whole windows out of 14 tokens
    assert sum(int(window["num_bytes"]) for window in windows) == sum(token < 256 for token in predicted)


def test_a_limit_spreads_the_windows_over_the_text(data):
    text = "".join(chr(ord("a") + number % 26) for number in range(301))
    windows = data.WindowDataset([text], data.ByteTokenizer(), context_length=4, limit=10)
    starts = [bytes(window["input_ids"].tolist()).decode() for window in windows]
    assert starts == [text[30 * number : 30 * number + 4] for number in range(10)]


@pytest.mark.parametrize("text", ["def f(x):\n    return x\n", "größer 漢字 🙂 = 1\n", "\r\n\ttabs"])
def test_bytes_of_tokens_add_up_to_the_text(data, text):
    tokenizer = data.PretrainedTokenizer(trained_tokenizer())
    tokens, sizes = tokenizer.encode(text)
    assert len(tokens) == len(sizes)
    assert sizes.sum() == len(text.encode())
    assert tokenizer.decode(tokens.tolist()) == text
    assert isinstance(tokens, np.ndarray) and tokens.dtype == np.int32
