"""Trains or serves a small model in the given way, as a user would.

Prints the losses or the tokens, and the number of calls of kernels.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.randint(1, 64, (3, 4, 12), generator=torch.Generator().manual_seed(0))


def build():
    torch.manual_seed(0)
    config = LlamaConfig(
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2),
    )
    return LlamaForCausalLM(config)


def adapted(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))


def with_trainer(model):
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for row in TOKENS.flatten(0, 1)]
    arguments = TrainingArguments(
        sys.argv[2],
        max_steps=3,
        per_device_train_batch_size=4,
        logging_steps=1,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def loop(model, parameters, backward=torch.Tensor.backward):
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1), []
    for batch in TOKENS:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def in_a_loop(model):
    return loop(model, model.parameters())


def with_accelerate(model):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    return loop(prepared, prepared.parameters(), accelerator.backward)


def sharded(wrap):
    from torch import distributed

    distributed.init_process_group("gloo")
    model = build()
    wrapped = wrap(model)
    return model, loop(wrapped, wrapped.parameters())  # so that the wrapper is freed first, as in `launched`


def fsdp2(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


def ddp(model):
    return torch.nn.parallel.DistributedDataParallel(model)


def launched():
    """Train with an `Accelerator`, which obeys the environment of ``accelerate launch``, FSDP included."""
    from accelerate import Accelerator

    sys.path.append(str(Path(__file__).parents[1]))
    from support.accelerating import shard_on_cpus

    shard_on_cpus()
    accelerator, model = Accelerator(cpu=True), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for batch in TOKENS:
        loss = prepared(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    wrapped, parameter = type(prepared).__name__, type(next(prepared.parameters())).__name__
    # The wrapper is freed before its process group, because the last holder of the group waits for gloo's threads. DDP
    # would keep the GIL meanwhile, and such a thread may want it (pytorch#56297), so both would wait for ever.
    prepared, optimizer = accelerator.free_memory(prepared, optimizer)
    accelerator.end_training()
    return {**told(model, losses), "wrapped": wrapped, "parameter": parameter}


def generated(model):
    return model.generate(TOKENS[0], max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=None).tolist()


def generated_in_batches(model):
    from transformers import GenerationConfig

    how = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0, eos_token_id=-1)
    requests = model.generate_batch(TOKENS[0].tolist(), generation_config=how, progress_bar=False)
    return [requests[name].generated_tokens for name in sorted(requests)]


WAYS = {
    "trainer": lambda model: (model, with_trainer(model)),
    "adapted": lambda model: (tuned := adapted(model), with_trainer(tuned)),
    "accelerate": lambda model: (model, with_accelerate(model)),
    "loop": lambda model: (model, in_a_loop(model)),
    "generate": lambda model: (model, generated(model)),
    "generate_batch": lambda model: (model, generated_in_batches(model)),
}
SHARDED = {"fsdp2": fsdp2, "fsdp1": fsdp1, "ddp": ddp}


def told(model, losses):
    from fuseplug import manager

    applied = manager.applied_to(model)
    return {"losses": losses, "calls": sum(each.fused for each in applied.calls()) if applied else 0}


if __name__ == "__main__":
    way, rank = sys.argv[1], os.environ.get("RANK", "0")
    if way == "launched":
        found = {way: launched()}
    elif way in SHARDED:
        found = {way: told(*sharded(SHARDED[way]))}
    else:
        found = {name: told(*WAYS[name](build())) for name in way.split(",")}
    if rank == "0":
        print(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if "RANK" in os.environ:
        time.sleep(0.5)  # as in tests/support/ranks.py
