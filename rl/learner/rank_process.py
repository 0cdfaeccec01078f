"""One of the ranks that share an update: `python -m rl.learner.rank_process SOCKET`.

torchrun starts as many as there are ranks. Each connects to the owner's socket, says
which one it is and becomes a learner; then a method and its arguments come in, and what
it returned or raised goes back.

Invariants:
- It ends when the owner is gone.
- An error of `rl.errors` is an answer. Any other is a bug: it ends the process, its
  traceback goes to the log, and torchrun ends the other ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from rl.errors import CampaignError
from rl.learner.peft_learner import PeftLearner, seed_process
from rl.learner.rank_protocol import Answer, Call, Hello, Setup, connection
from rl.learner.ranks import ProcessGroup

CONNECT_S = 60.0
IDLE_S = 86_400.0  # until the owner's next word; its death is noticed at once


def main(argv: list[str]) -> None:
    """Serve the owner at the socket named on the command line until it hangs up."""
    (path,) = argv
    rank = int(os.environ["RANK"])
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(CONNECT_S)
        end.connect(path)
        end.settimeout(None)
        with connection(end, IDLE_S) as owner:
            owner.send(Hello(rank))
            try:
                _serve(owner, rank)
            except (EOFError, ConnectionError):
                print("the owner is gone", file=sys.stderr, flush=True)


def _serve(owner: Connection, rank: int) -> None:
    setup: Setup = owner.recv()
    try:
        learner = _learner(setup)
    except CampaignError as error:
        owner.send(Answer(0, error=error))
        return
    owner.send(Answer(learner.version))
    while True:
        call: Call = owner.recv()
        value: Any = None
        try:
            value = getattr(learner, call.method)(*call.arguments)
        except CampaignError as error:
            owner.send(Answer(learner.version, error=error))
            continue
        # All ranks hold the same; once is enough to carry.
        owner.send(Answer(learner.version, value if rank == 0 else None))


def _learner(setup: Setup) -> PeftLearner:
    trainer = setup.config.trainer
    cuda = trainer.device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timedelta(seconds=trainer.update_timeout_s),
    )
    seed_process(setup.config.seed)
    return PeftLearner(setup.config, setup.model_dir, ProcessGroup(in_step=trainer.shard_base))


if __name__ == "__main__":
    main(sys.argv[1:])
