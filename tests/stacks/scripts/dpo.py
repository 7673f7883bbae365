"""TRL's DPO, with a reference model of its own."""

import sys

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer

model, out = sys.argv[1:]
trainer = DPOTrainer(
    model=model,
    args=DPOConfig(
        out,
        max_steps=20,
        per_device_train_batch_size=4,
        learning_rate=0.03,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files=f"{model}/pairs.jsonl", split="train"),
)
trainer.train()
trainer.save_state()
