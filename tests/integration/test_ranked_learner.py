"""A learner of two real ranks equals one that is alone, and none of its processes is left."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save

from actors.ranked_learner import RankedLearner
from rl.config import CampaignConfig
from rl.errors import ConfigurationError, EvidenceError, StalenessViolation, TrainerError
from rl.learner.peft_learner import NonFiniteError, PeftLearner
from rl.records import AdapterBytes, Group
from tests.support.campaigns import ROOT
from tests.unit.rl.learner.tiny_policy import make_config, random_group, write_model

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

EXACT = 1e-5  # relative, fp32
# Adam's step divides by the gradient's size; beside so large a number it is the gradient.
LIKE_SGD = {"lr": 0.5, "eps": 1e3, "clip_norm": 1e6}
SETTINGS = {
    "micro_batch_tokens": 60,
    "optimizer": LIKE_SGD,
    "gradient_checkpointing": True,
    "update_timeout_s": 60.0,  # ranks that lose step wait for each other in vain
}
GONE_S = 30.0
WEIGHTS = "adapter_model.safetensors"

Learner = PeftLearner | RankedLearner


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[False, True], ids=["whole base", "base in pieces"])
def config(request) -> CampaignConfig:
    return make_config(ranks=2, shard_base=request.param, **SETTINGS)


@pytest.fixture(scope="module")
def ranked(config, model_dir, tmp_path_factory) -> Iterator[RankedLearner]:
    learner = RankedLearner(config, model_dir, tmp_path_factory.mktemp("logs") / "ranks.log")
    yield learner
    learner.stop()
    assert learner.processes() == []


@pytest.fixture
def alone(model_dir) -> PeftLearner:
    return PeftLearner(make_config(**SETTINGS), model_dir)


def flat_rewards(group: Group) -> Group:
    """Its gradient is none, so no rank differentiates."""
    episodes = [e.model_copy(update={"reward": 1.0}) for e in group.episodes]
    return group.model_copy(update={"episodes": episodes})


def unequal(group: Group) -> Group:
    """Only the last attempt has an advantage, so only one rank differentiates."""
    rewards = [0.5, 0.5, 0.0, 1.0]
    episodes = [
        e.model_copy(update={"reward": r}) for e, r in zip(group.episodes, rewards, strict=True)
    ]
    return group.model_copy(update={"episodes": episodes})


def one_update(learner: Learner):
    """Groups streamed in every way that there is."""
    update, version = learner.version + 1, learner.version
    learner.accumulate(update, random_group("whole", 10 * update, version))
    learner.accumulate(update, flat_rewards(random_group("flat", 10 * update + 1, version)))
    learner.accumulate(update, unequal(random_group("unequal", 10 * update + 2, version)))
    early = random_group("early", 10 * update + 3, version)
    assert learner.accumulate_attempts(update, "early", early.episodes[:1]) == 1
    assert learner.accumulate_attempts(update, "early", early.episodes[1:3]) == 2
    learner.accumulate(update, early)
    gone = random_group("gone", 10 * update + 4, version)
    learner.accumulate_attempts(update, "gone", gone.episodes[:3])
    learner.drop("gone")
    return learner.step(update, ["early", "flat", "unequal", "whole"])


def trained_by(before: AdapterBytes, after: AdapterBytes) -> torch.Tensor:
    """What updates have added to the adapter's weights, in one row."""
    old, new = (load(adapter.files[WEIGHTS]) for adapter in (before, after))
    return torch.cat([(new[name] - old[name]).flatten() for name in sorted(new)])


def test_two_ranks_make_the_update_of_one(ranked: RankedLearner, alone: PeftLearner) -> None:
    fresh = alone.export()
    assert ranked.export().sha256 == fresh.sha256
    for _ in range(2):
        wanted, found = one_update(alone).model_dump(), one_update(ranked).model_dump()
        for name in set(wanted) - {"seconds", "computed_tokens"}:
            assert found[name] == pytest.approx(wanted[name], rel=EXACT), name
        assert wanted["computed_tokens"] <= found["computed_tokens"] <= 2 * wanted["total_tokens"]
    theirs, ours = trained_by(fresh, alone.export()), trained_by(fresh, ranked.export())
    assert float((theirs - ours).abs().max() / theirs.abs().max()) <= EXACT
    assert float(theirs.abs().max()) > 0


def test_they_go_on_bit_for_bit_where_a_state_was_taken(ranked: RankedLearner) -> None:
    state = ranked.state()
    first = one_update(ranked).model_dump(exclude={"seconds"}), ranked.export().sha256
    ranked.load_state(state)
    assert ranked.version == state.adapter.version
    again = one_update(ranked).model_dump(exclude={"seconds"}), ranked.export().sha256
    assert again == first


def test_what_one_refuses_all_refuse(ranked: RankedLearner) -> None:
    update, version = ranked.version + 1, ranked.version
    with pytest.raises(StalenessViolation, match="stale"):
        ranked.accumulate(update, random_group("late", 1, version - 2))
    with pytest.raises(EvidenceError, match="no sampled token"):
        ranked.step(update)
    state = ranked.state()
    ranked.load_state(replace(state, adapter=broken(state.adapter)))
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        ranked.accumulate(update, random_group("g", 3, version))
    ranked.load_state(state)
    one_update(ranked)


def broken(adapter: AdapterBytes) -> AdapterBytes:
    """The same adapter with weights that are no numbers."""
    weights = load(adapter.files[WEIGHTS])
    nothing = {name: torch.full_like(weight, math.nan) for name, weight in weights.items()}
    return adapter.model_copy(update={"files": {**adapter.files, WEIGHTS: save(nothing)}})


def gone(pids: list[int]) -> bool:
    limit = time.monotonic() + GONE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


def rank_processes(pids: list[int]) -> list[int]:
    """Those of the ranks themselves, torchrun and the guard left out."""
    found = []
    for pid in pids:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        if "rl.learner.rank_process" in line and "torch.distributed.run" not in line:
            found.append(pid)
    return found


def test_a_dead_rank_is_an_error_that_ends_the_others(model_dir, tmp_path) -> None:
    log = tmp_path / "ranks.log"
    learner = RankedLearner(make_config(ranks=2, **SETTINGS), model_dir, log)
    pids = learner.processes()
    os.kill(rank_processes(pids)[1], signal.SIGKILL)
    with pytest.raises(TrainerError, match=r"never came; its log ends"):
        one_update(learner)
    assert gone(pids)
    with pytest.raises(TrainerError, match="stopped"):
        learner.export()


OWNER = """
import sys, time
from pathlib import Path
from actors.ranked_learner import RankedLearner
from tests.unit.rl.learner.tiny_policy import make_config
learner = RankedLearner(make_config(ranks=2), Path(sys.argv[1]), Path(sys.argv[2]))
print(*learner.processes(), flush=True)
time.sleep(600)
"""


def test_a_killed_owner_leaves_no_rank_behind(model_dir, tmp_path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(model_dir), str(tmp_path / "ranks.log")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(rank_processes(pids)) == 2
        owner.kill()
        assert gone(pids)


def test_a_model_that_is_not_there_is_named(tmp_path) -> None:
    config = make_config(ranks=2)
    with pytest.raises(ConfigurationError, match="no model directory"):
        RankedLearner(config, tmp_path / "nothing", tmp_path / "ranks.log")
