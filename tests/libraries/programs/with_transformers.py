import json

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Sentences(Dataset):
    """Sentences of different lengths."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"input_ids": [1 + (index + place) % 30 for place in range(4 + index % 5)], "labels": index % 2}


def pad(samples):
    length = max(len(sample["input_ids"]) for sample in samples)
    tokens = [sample["input_ids"] + [0] * (length - len(sample["input_ids"])) for sample in samples]
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": torch.tensor(tokens), "attention_mask": (torch.tensor(tokens) > 0).long(), "labels": labels}


class Log(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        kept = {name: round(value, 5) for name, value in logs.items() if name in ("loss", "eval_loss", "train_loss")}
        print(json.dumps({"step": state.global_step, **kept}))


def main():
    torch.manual_seed(0)
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    arguments = TrainingArguments(
        output_dir="trained",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        eval_strategy="epoch",
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(
        BertForSequenceClassification(config),
        arguments,
        data_collator=pad,
        train_dataset=Sentences(30),
        eval_dataset=Sentences(10),
        callbacks=[Log()],
    )
    trainer.train()
    print(json.dumps({"predictions": trainer.predict(Sentences(6)).predictions.round(4).tolist()}))


if __name__ == "__main__":
    main()
