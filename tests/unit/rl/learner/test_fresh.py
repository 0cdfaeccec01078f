from __future__ import annotations

import pytest

from rl.errors import EvidenceError
from rl.learner.checkpoint import load, save_checkpoint
from rl.learner.fresh import verify_fresh
from rl.learner.peft_learner import PeftLearner
from rl.learner.state import LearnerState
from tests.unit.rl.learner.tiny_policy import make_config, random_group


def test_a_checkpoint_resumes_and_proves_itself_afresh(model_dir, tmp_path):
    config = make_config()
    learner = PeftLearner(config, model_dir)
    for update in (1, 2):
        learner.accumulate(update, random_group("g", update, update - 1))
        learner.step(update)
    path = save_checkpoint(tmp_path, 2, learner.state(), {"next": 3}, config.digest())
    assert verify_fresh(path, model_dir, config) < 1e-5
    second = PeftLearner(config, model_dir)
    second.load_state(load(path, config.digest()).learner)
    assert second.version == 2
    assert second.state() == learner.state()


def test_an_adapter_that_is_not_what_the_probe_says_is_refused(model_dir, tmp_path):
    config = make_config()
    learner = PeftLearner(config, model_dir)
    untrained = learner.state()
    learner.accumulate(1, random_group("g", 1, 0))
    learner.step(1)
    state = learner.state()
    wrong = state.adapter.model_copy(update={"probe": untrained.adapter.probe})
    path = save_checkpoint(tmp_path, 1, LearnerState(wrong, state.optimizer), {}, config.digest())
    with pytest.raises(EvidenceError, match="differ by"):
        verify_fresh(path, model_dir, config)
