"""A Hugging Face Trainer on a tiny BERT made from a config: python trainer_script.py [num_workers]."""

import json
import os
import sys
import tempfile
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
warnings.filterwarnings("ignore", message=".*pin_memory.*")

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed

num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
set_seed(0)


class Sentences(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = (torch.arange(12) * (index + 3)) % 50
        return {"input_ids": tokens, "attention_mask": torch.ones(12, dtype=torch.long), "labels": index % 2}


class Record(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


config = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=16,
    num_labels=2,
)
record = Record()
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=2,
            per_device_train_batch_size=8,
            per_device_eval_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=num_workers,
            seed=0,
        ),
        train_dataset=Sentences(60),
        eval_dataset=Sentences(21),
        callbacks=[record],
    )
    trainer.train()
    evaluated = trainer.evaluate()
print(json.dumps({"program": "trainer", "losses": record.losses, "eval_loss": evaluated["eval_loss"]}))
