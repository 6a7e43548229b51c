"""Train an encoder–decoder to correct:

    train_corrector.py DATA FOLDER SIZE [--minutes N]

DATA is what slips.py made; SIZE is target (10 million parameters) or draft (1.5 million). Goes on where an earlier run was
stopped. Leaves FOLDER as `outrider.load` opens it, with the loss on test lines in FOLDER/trained.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_utils import get_last_checkpoint

SIZES: dict[str, dict[str, int]] = {
    "target": {"d_model": 256, "encoder_layers": 3, "decoder_layers": 6, "heads": 4},
    "draft": {"d_model": 128, "encoder_layers": 2, "decoder_layers": 1, "heads": 2},
}
LONGEST = 96  # tokens of a line
TESTED = 500  # lines
RATE, WARM_UP, FALL = 1e-3, 300, 0.4  # of learning; steps; the share of the time in which it falls to nothing


class Lines(torch.utils.data.Dataset[dict[str, Any]]):
    """Pairs of a file as token ids, in batches of like lengths by the trainer."""

    def __init__(self, file: Path, tokenizer: Any, limit: int | None = None) -> None:
        pairs = [json.loads(line) for line in file.read_text().splitlines()[:limit]]
        columns = [tokenizer([pair[name] for pair in pairs])["input_ids"] for name in ("prompt", "reference")]
        self.pairs = [pair for pair in zip(*columns, strict=True) if max(map(len, pair)) <= LONGEST]

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> dict[str, Any]:
        source, target = self.pairs[i]
        return {"input_ids": source, "labels": target, "length": len(source)}


class Until(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops after so many minutes."""

    def __init__(self, minutes: float) -> None:
        self.seconds, self.began = minutes * 60, time.monotonic()

    @property
    def left(self) -> float:
        """The share of the time that is left."""
        return max(0.0, 1 - (time.monotonic() - self.began) / self.seconds)

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer."""
        control.should_training_stop = self.left == 0


def new_model(size: dict[str, int], tokenizer: Any) -> Any:
    """A Marian without weights, its vocabulary the tokenizer's."""
    wide = size["d_model"]
    config = transformers.MarianConfig(
        vocab_size=len(tokenizer),
        d_model=wide,
        encoder_layers=size["encoder_layers"],
        decoder_layers=size["decoder_layers"],
        encoder_attention_heads=size["heads"],
        decoder_attention_heads=size["heads"],
        encoder_ffn_dim=4 * wide,
        decoder_ffn_dim=4 * wide,
        max_position_embeddings=256,
        scale_embedding=True,
        activation_function="relu",
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(config)


def main() -> None:
    """Train, test, save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--minutes", type=float, default=30)
    given = parser.parse_args()
    transformers.set_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.data / "tokenizer")
    model = new_model(SIZES[given.size], tokenizer)
    until = Until(given.minutes)
    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=str(given.folder / "checkpoints"),
        per_device_train_batch_size=48,
        per_device_eval_batch_size=48,
        num_train_epochs=1000,
        train_sampling_strategy="group_by_length",
        length_column_name="length",
        logging_steps=50,
        save_steps=500,
        save_total_limit=1,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP, until.left / FALL))
    train, test = Lines(given.data / "train.jsonl", tokenizer), Lines(given.data / "test.jsonl", tokenizer, TESTED)
    trainer = transformers.Seq2SeqTrainer(
        model=model,
        args=arguments,
        train_dataset=train,
        eval_dataset=test,
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
        callbacks=[until],
        optimizers=(optimizer, rates),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir) if given.folder.exists() else None)
    loss = trainer.evaluate()["eval_loss"]
    model.save_pretrained(given.folder)
    tokenizer.save_pretrained(given.folder)
    told = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": trainer.state.global_step,
        "loss": loss,
    }
    (given.folder / "trained.json").write_text(json.dumps(told))
    print(told)


if __name__ == "__main__":
    main()
