"""The campaign that is exported."""

import shutil
from pathlib import Path

import pytest

from rl.evidence.dataset.build import Request, build
from rl.evidence.layout import CampaignDir
from tests.unit.rl.evidence import synthetic


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CampaignDir:
    return synthetic.build(tmp_path_factory.mktemp("made"))


@pytest.fixture
def campaign(made: CampaignDir, tmp_path: Path) -> CampaignDir:
    return CampaignDir(shutil.copytree(made.root, tmp_path / made.run_id))


@pytest.fixture(scope="module")
def exported(made: CampaignDir, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "dataset"
    build([made], out, Request(with_failed=True, sft=True, preferences=True))
    return out
