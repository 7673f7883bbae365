"""A hand-written training loop with FSDP2, which torchrun starts."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, out = map(Path, sys.argv[1:])
distributed.init_process_group("gloo")
mesh = distributed.device_mesh.init_device_mesh("cpu", (distributed.get_world_size(),))
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
losses = []
for _ in range(20):
    first = 8 * distributed.get_rank()
    tokens = tokenizer(texts[first : first + 8], max_length=128, truncation=True, return_tensors="pt")["input_ids"]
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append({"loss": loss.item()})
if distributed.get_rank() == 0:
    out.mkdir()
    (out / "trainer_state.json").write_text(json.dumps({"log_history": losses}))
distributed.barrier()
distributed.destroy_process_group()
time.sleep(0.5)  # as in tests/support/ranks.py
