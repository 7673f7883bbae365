"""Checks that run in two processes at once, which share a process group: one pair of processes for many checks."""

import datetime
import socket
import time
import traceback
import warnings

import torch
from torch import distributed, multiprocessing

_IMPORTED = ("torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "support.losses", "support.kernels")
"""Modules that take seconds to import, and are imported once for all ranks of a run."""

_PATIENCE = datetime.timedelta(seconds=60)
"""How long a rank waits for one that failed."""

GLOO_LETS_GO = 0.5
"""Seconds in which gloo's threads drop the tensors of the last collective; for that they need the GIL.

If Python ends before that, it stops such a thread in a C++ destructor, which aborts the process: "terminate called
without an active exception" (pytorch#190489). Fuseplug plays no part in this. With torch 2.13 alone, of 52 ranks that
kept the group, had a heap of a million lists and ended after an `all_reduce`, 7 were aborted; of 80 that slept before,
none.
"""


def failures(check, cases):
    """Call ``check(*case)`` for each of *cases* on two ranks; return what it raised, by case and rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    found = context.SimpleQueue()
    arguments = (port, check, list(cases), found)
    multiprocessing.start_processes(_rank, args=arguments, nprocs=2, start_method="forkserver")
    raised = {}
    while not found.empty():
        case, rank, text = found.get()
        raised.setdefault(case, []).append(f"rank {rank}: {text}")
    return {case: "\n".join(texts) for case, texts in raised.items()}


def asked(request, *names):
    """The parameters *names* of the chosen tests in the module of *request*, as cases for the ranks."""
    chosen = [item for item in request.session.items if item.path == request.path]
    return [tuple(map(item.callspec.params.get, names)) for item in chosen if hasattr(item, "callspec")]


def _rank(rank, port, check, cases, found):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=_PATIENCE)
    for case in cases:
        try:
            check(*case)
        except Exception:
            found.put((case, rank, traceback.format_exc()[-2000:]))
    distributed.destroy_process_group()
    time.sleep(GLOO_LETS_GO)


def same_on_all(value):
    """Assert that every rank has this *value*."""
    gathered = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, value)
    assert gathered == gathered[:1] * len(gathered)
