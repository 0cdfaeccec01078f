"""The compaction table refuses what can't work."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rl.agent_config import AgentConfig, CompactionConfig


def test_the_threshold_is_given_in_tokens_or_as_a_share_of_the_window() -> None:
    assert CompactionConfig(threshold_tokens=700, summary_tokens=9).threshold(1000) == 700
    assert CompactionConfig(threshold_share=0.6, summary_tokens=9).threshold(1000) == 600


@pytest.mark.parametrize("both", [{}, {"threshold_tokens": 700, "threshold_share": 0.5}])
def test_one_threshold_is_wanted(both: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="threshold_share"):
        CompactionConfig.model_validate({"summary_tokens": 9} | both)


def test_a_summary_is_one_reply() -> None:
    compaction = {"threshold_tokens": 700, "summary_tokens": 65}
    agent = {"system_prompt": "x", "max_turns": 2, "max_new_tokens": 64, "compaction": compaction}
    with pytest.raises(ValidationError, match="summary_tokens"):
        AgentConfig.model_validate(agent)
