"""transformers' Trainer."""

import json
import sys
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

model, out = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(model)
lines = [json.loads(line) for line in (Path(model) / "text.jsonl").read_text().splitlines()]
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained(model),
    TrainingArguments(
        out,
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=0.3,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        dataloader_num_workers=1,
    ),
    train_dataset=[tokenizer(line["text"]) for line in lines],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)
trainer.train()
trainer.save_state()
