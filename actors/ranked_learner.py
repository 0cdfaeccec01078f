"""A learner of several ranks, each a process with its own GPU, under torchrun.

Invariants:
- To its owner it is a `PeftLearner`: the same methods, results and errors.
- A call is answered by every rank, with the same version and the same error or none,
  or it fails; after a failure no rank runs any more.
- No rank outlives the owner (see `actors.trainer_process`).
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from actors.trainer_process import TrainerProcess, inherited
from rl.config import CampaignConfig
from rl.errors import DeadlineExceeded, TrainerError
from rl.learner.rank_protocol import Answer, Call, Hello, Method, Setup, connection
from rl.learner.state import LearnerState
from rl.records import AdapterBytes, EpisodeRecord, Group, UpdateMetrics

REPOSITORY = Path(__file__).resolve().parent.parent
START_S = 600.0  # imports, and the base weights from a cold disk
STOP_S = 20.0
POLL_S = 0.5  # between looks at the processes while an answer is awaited


def command(ranks: int, address: Path) -> tuple[str, ...]:
    """How the ranks of an owner that listens at `address` are started."""
    return (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={ranks}", "--local-addr=localhost"),
        *("-m", "rl.learner.rank_process", str(address)),
    )


def environment(config: CampaignConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The ranks' environment, built on `environ`."""
    return {
        **inherited(environ),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(config.trainer.threads),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        # All ranks are on this machine, and nobody else is to reach them.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }


class RankedLearner:
    """See the module's invariants.

    Args:
        config: the campaign's.
        model_dir: base weights.
        log_path: of all ranks.

    Raises:
        TrainerError: a rank did not start.
        DeadlineExceeded: they were not ready within `START_S`.
        ConfigurationError: as `PeftLearner`.
    """

    def __init__(self, config: CampaignConfig, model_dir: Path, log_path: Path) -> None:
        self._limit_s = config.trainer.update_timeout_s
        self._version = 0
        self._ranks: list[Connection] = []
        folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # its owner's alone
        address = folder / "socket"
        self._process = TrainerProcess(
            "trainer ranks",
            command(config.trainer.ranks, address),
            environment(config, os.environ),
            log_path,
        )
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(address))
                listener.listen(config.trainer.ranks)
                self._process.start()
                deadline = time.monotonic() + START_S
                self._ranks = self._accepted(listener, config.trainer.ranks, deadline)
            self._ask(Setup(config, Path(model_dir).resolve()), deadline, "the model")
        except BaseException:
            self.stop()
            raise
        finally:
            shutil.rmtree(folder)

    @property
    def version(self) -> int:
        """The policy version that the weights are."""
        return self._version

    def accumulate(self, update: int, group: Group) -> None:
        """As `PeftLearner.accumulate`."""
        self._call("accumulate", update, group)

    def accumulate_attempts(self, update: int, group_id: str, episodes: list[EpisodeRecord]) -> int:
        """As `PeftLearner.accumulate_attempts`."""
        return self._call("accumulate_attempts", update, group_id, episodes)

    def drop(self, group_id: str) -> None:
        """As `PeftLearner.drop`."""
        self._call("drop", group_id)

    def step(self, update: int, group_ids: Sequence[str] | None = None) -> UpdateMetrics:
        """As `PeftLearner.step`."""
        return self._call("step", update, group_ids)

    def export(self) -> AdapterBytes:
        """As `PeftLearner.export`."""
        return self._call("export")

    def state(self) -> LearnerState:
        """As `PeftLearner.state`."""
        return self._call("state")

    def load_state(self, state: LearnerState) -> None:
        """As `PeftLearner.load_state`."""
        self._call("load_state", state)

    def processes(self) -> list[int]:
        """Ids of all processes of the learner."""
        return self._process.processes()

    def stop(self) -> None:
        """End all ranks; nothing to do if none runs."""
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        self._process.stop(STOP_S)

    def _call(self, method: Method, *arguments: Any) -> Any:
        if not self._ranks:
            raise TrainerError("its ranks were stopped", self._process.who)
        try:
            return self._ask(
                Call(method, arguments), time.monotonic() + self._limit_s, f"the answer to {method}"
            )
        except (TrainerError, DeadlineExceeded):
            self.stop()
            raise

    def _accepted(self, listener: socket.socket, ranks: int, deadline: float) -> list[Connection]:
        """The connections of all ranks, in their order."""
        by_rank: dict[int, Connection] = {}
        listener.settimeout(POLL_S)
        while len(by_rank) < ranks:
            try:
                end, _ = listener.accept()
            except TimeoutError:
                self._check(deadline, "the ranks")
                continue
            end.settimeout(None)
            rank = connection(end, self._limit_s)
            hello: Hello = self._received(rank, deadline, "a rank's number")
            by_rank[hello.rank] = rank
        return [rank for _, rank in sorted(by_rank.items())]

    def _ask(self, message: Setup | Call, deadline: float, what: str) -> Any:
        """Rank 0's value, when all have answered."""
        try:
            for rank in self._ranks:
                rank.send(message)
        except (BlockingIOError, ConnectionError):
            raise self._process.lost(what) from None
        answers: list[Answer] = [self._received(rank, deadline, what) for rank in self._ranks]
        errors = [answer.error for answer in answers]
        versions = {answer.version for answer in answers}
        if len({str(error) for error in errors}) > 1 or len(versions) > 1:
            raise TrainerError(
                f"ranks disagree after {what}: versions {sorted(versions)}, "
                f"errors {[str(error) for error in errors]}",
                self._process.who,
                f"the log is {self._process.log_path}; continue with --resume",
            )
        (self._version,) = versions
        if errors[0] is not None:
            raise errors[0]
        return answers[0].value

    def _received(self, rank: Connection, deadline: float, what: str) -> Any:
        try:
            while not rank.poll(POLL_S):
                self._check(deadline, what)
            return rank.recv()
        except (EOFError, BlockingIOError, ConnectionError):
            self._process.await_exit(STOP_S)  # the reason is in its log
            raise self._process.lost(what) from None

    def _check(self, deadline: float, what: str) -> None:
        """Raise if the processes have ended or time is up."""
        if not self._process.alive():
            raise self._process.lost(what)
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(
                f"{what} did not come in time",
                self._process.who,
                f"its log is {self._process.log_path}",
            )
