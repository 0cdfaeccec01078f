"""Our side of the contract against prime-rl's real code, where that can be imported.

Set PRIME_RL_SRC to its sources, a folder that holds `prime_rl`, in an environment
that has what they import; docs/prime-rl.md says how.
"""

# Type checking has no prime-rl.
# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rl.config import CampaignConfig
from rl.learner.losses import token_loss
from rl.learner.prime import wire
from rl.learner.prime.batches import PendingBatch
from rl.learner.prime.files import PrimeFiles
from rl.learner.prime.installation import SCRIPT, check_answer, question
from rl.learner.prime.pinned import MICRO_BATCH_FIELDS, SOURCES
from rl.learner.prime.settings import first_difference, native_config
from rl.records import Group
from tests.support.prime_config import TEMPERATURE, prime_campaign, sampled_group

SOURCES_VARIABLE = "PRIME_RL_SRC"
if os.environ.get(SOURCES_VARIABLE):
    sys.path.append(os.environ[SOURCES_VARIABLE])
try:
    import msgspec
    import prime_rl
    import torch
    from prime_rl.configs.shared import FileSystemTransportConfig
    from prime_rl.configs.trainer import DefaultLossConfig, TrainerConfig
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from prime_rl.trainer.rl.data import DataLoader
    from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn
    from prime_rl.transports.rollouts.types import MicroBatch, TrainingSample
    from prime_rl.utils import pathing
    from prime_rl.utils.config import cli
except ImportError as error:
    pytest.skip(f"prime-rl can't be imported here: {error}", allow_module_level=True)

GROUPS = [sampled_group("g0"), sampled_group("g1", prompt=9), sampled_group("g2", prompt=3)]
SMALL = 24  # tokens: several micro-batches, several sequences in most


def ranks_of(config: CampaignConfig, budget: int, ranks: int) -> list[list[wire.MicroBatch]]:
    pending = PendingBatch(config, budget, ranks)
    for group in GROUPS:
        pending.add(1, 0, group)
    return pending.ranks_of(1, [group.group_id for group in GROUPS])


def decoded(batches: list[wire.MicroBatch]) -> list[MicroBatch]:
    return msgspec.msgpack.Decoder(list[MicroBatch]).decode(wire.encode(batches))


def samples(groups: list[Group]) -> list[TrainingSample]:
    """The same episodes as prime-rl's own orchestrator would hand them to its packer."""
    found: list[TrainingSample] = []
    for group in groups:
        mean = math.fsum(group.rewards) / len(group.rewards)
        for episode in group.episodes:
            (sample,) = episode.samples
            assert episode.reward is not None
            found.append(
                TrainingSample(
                    token_ids=sample.token_ids,
                    mask=sample.sampled,
                    logprobs=sample.logprobs,
                    temperatures=[TEMPERATURE] * len(sample.token_ids),
                    env_name=wire.ENVIRONMENT,
                    advantages=[(episode.reward - mean) * on for on in sample.sampled],
                )
            )
    return found


def test_the_wire_type_is_the_pinned_one() -> None:
    assert MicroBatch.__struct_fields__ == MICRO_BATCH_FIELDS
    assert MicroBatch.__struct_config__.array_like


def test_the_sources_are_the_pinned_ones() -> None:
    places = [Path(place) for place in prime_rl.__path__]
    for name, digest in SOURCES.items():
        path = next(place / name for place in places if (place / name).is_file())
        assert hashlib.sha256(path.read_bytes()).hexdigest() == digest, name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_our_bytes_are_those_of_their_encoder(ranks: int) -> None:
    for share in ranks_of(prime_campaign(), SMALL, ranks):
        theirs = decoded(share)
        assert [batch.input_ids for batch in theirs] == [batch.input_ids for batch in share]
        assert msgspec.msgpack.Encoder().encode(theirs) == wire.encode(share)


def test_one_batch_of_ours_is_the_one_that_their_packer_makes() -> None:
    config = prime_campaign()
    ((ours,),) = ranks_of(config, 1000, 1)
    ((theirs,),) = prepare_batch(samples(GROUPS), 1000, 1, build_bin_cost(None))
    assert decoded([ours]) == [theirs]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_our_packing_trains_the_tokens_that_theirs_does(ranks: int) -> None:
    def trained(batches: list[list[MicroBatch]]) -> list[tuple[Any, ...]]:
        found: list[tuple[Any, ...]] = []
        for batch in [batch for share in batches for batch in share]:
            assert len(batch.input_ids) <= SMALL
            start = 0
            for length in batch.sequence_lengths:
                span = slice(start, start + length)
                start += length
                if any(batch.loss_mask[span]):
                    parts = (batch.input_ids, batch.loss_mask, batch.advantages)
                    found.append(tuple(tuple(part[span]) for part in parts))
        return sorted(found)

    ours = [decoded(share) for share in ranks_of(prime_campaign(), SMALL, ranks)]
    theirs = prepare_batch(samples(GROUPS), SMALL, ranks, build_bin_cost(None))
    assert {len(share) for share in ours} == {len(ours[0])}
    assert trained(ours) == trained(theirs)


def test_their_loader_reads_our_files(tmp_path: Path) -> None:
    files = PrimeFiles(tmp_path)
    (share,) = ranks_of(prime_campaign(), SMALL, 1)
    files.write_batch(4, [share])
    loader = DataLoader(tmp_path, 4, 1, FileSystemTransportConfig())
    loader.wait_for_batch()
    tensors = loader.get_batch()
    assert [batch["input_ids"].tolist() for batch in tensors] == [[b.input_ids] for b in share]
    assert [batch["loss_mask"].tolist() for batch in tensors] == [[b.loss_mask] for b in share]
    temperatures = torch.cat([batch["temperatures"].flatten() for batch in tensors])
    torch.testing.assert_close(temperatures, torch.full_like(temperatures, TEMPERATURE))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5, 2.0])
def test_their_loss_of_our_batch_is_our_loss(tmp_path: Path, ranks: int, spread: float) -> None:
    config = prime_campaign()
    files = PrimeFiles(tmp_path)
    shares = ranks_of(config, SMALL, ranks)
    files.write_batch(1, shares)
    draw = random.Random(f"{ranks} {spread}")
    rl_scale = sum(batch.loss_tokens for share in shares for batch in share)
    loss_fn = setup_rl_loss_fn(
        TrainerConfig.model_validate(native_config(config, tmp_path, tmp_path, 0)).loss
    )
    theirs, ours = torch.zeros(()), torch.zeros(())
    decoder = msgspec.msgpack.Decoder(list[MicroBatch])
    compared = 0
    for rank in range(ranks):
        content = (tmp_path / "rollouts" / "step_1" / f"rank_{rank}.bin").read_bytes()
        for batch in decoder.decode(content):
            sampler = torch.tensor(batch.inference_logprobs)
            noise = torch.tensor([draw.gauss(0, spread) for _ in batch.input_ids])
            policy = torch.clamp(sampler + noise, max=-1e-4).requires_grad_()
            advantages, mask = torch.tensor(batch.advantages), torch.tensor(batch.loss_mask)
            lengths = batch.sequence_lengths
            loss, _ = compute_loss(
                trainer_logprobs=list(policy.split(lengths)),
                inference_logprobs=list(sampler.split(lengths)),
                ref_logprobs=None,
                advantages=list(advantages.split(lengths)),
                loss_mask=list(mask.split(lengths)),
                rl_weights=None,
                ce_weights=None,
                ref_kl_weights=None,
                rl_loss_fn=loss_fn,
                rl_scale=rl_scale,
                ce_scale=1,
                ref_kl_scale=1,
            )
            owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            mine = token_loss(config.trainer.loss, policy, sampler, advantages, mask, owner)
            (their_slope,) = torch.autograd.grad(loss, policy)
            (our_slope,) = torch.autograd.grad(mine.loss / rl_scale, policy)
            torch.testing.assert_close(their_slope, our_slope, rtol=1e-5, atol=1e-8)
            theirs += loss.detach()
            ours += mine.loss.detach() / rl_scale
            compared += int(mask.sum())
    assert (
        compared
        == rl_scale
        == sum(
            sample.sampled_tokens
            for group in GROUPS
            for e in group.episodes
            for sample in e.samples
        )
    )
    difference = abs(float(theirs - ours))
    print(f"ranks {ranks}, spread {spread}: theirs {float(theirs):.9f}, differ {difference:.1e}")
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-7)


def test_loss_defaults_are_theirs() -> None:
    native = native_config(prime_campaign(), Path("/model"), Path("/out"), 0)
    assert DefaultLossConfig() == DefaultLossConfig.model_validate(native["loss"])


@pytest.mark.parametrize("resume", [0, 7])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_their_configuration_takes_ours_as_it_is(tmp_path: Path, resume: int, warmup: int) -> None:
    optimizer = {"lr": 2e-5, "warmup_updates": warmup}
    config = prime_campaign(optimizer=optimizer, gradient_checkpointing=True)
    sent = native_config(config, tmp_path / "model", tmp_path, resume)
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps(sent))
    parsed = cli(TrainerConfig, args=["@", str(path)])
    assert first_difference(sent, parsed.model_dump(mode="json")) is None


def test_an_unknown_key_would_be_refused(tmp_path: Path) -> None:
    sent = native_config(prime_campaign(), tmp_path, tmp_path, 0)
    with pytest.raises(ValueError, match="learning_rate"):
        TrainerConfig.model_validate({**sent, "learning_rate": 1.0})


def test_paths_are_theirs(tmp_path: Path) -> None:
    files = PrimeFiles(tmp_path)
    assert files.rollouts == pathing.get_rollout_dir(tmp_path)
    assert files.broadcasts == pathing.get_broadcast_dir(tmp_path)
    assert files.checkpoints == pathing.get_ckpt_dir(tmp_path)
    assert files.broadcast(3) == pathing.get_step_path(files.broadcasts, 3)


def test_their_interpreter_answers_for_itself(tmp_path: Path) -> None:
    sent = native_config(prime_campaign(), tmp_path / "model", tmp_path, 0)
    path = tmp_path / "trainer.json"
    path.write_text(json.dumps(sent))
    places = [str(Path(place).parent) for place in prime_rl.__path__]
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        input=question(path),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*places, *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=True,
    )
    check_answer(done.stdout, sys.executable, sent)
