from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.rl.learner.tiny_policy import write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"))
