"""TRL's SFT with a LoRA adapter."""

import sys

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

model, out = sys.argv[1:]
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        out,
        max_steps=20,
        per_device_train_batch_size=8,
        learning_rate=2e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=load_dataset("json", data_files=f"{model}/text.jsonl", split="train"),
    peft_config=LoraConfig(target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]),
)
trainer.train()
trainer.save_state()
