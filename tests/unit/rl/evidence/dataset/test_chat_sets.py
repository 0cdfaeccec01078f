"""Chats and pairs are made of the episodes that are fit for it."""

from pathlib import Path

from rl.evidence.dataset.build import Request, build
from rl.evidence.layout import CampaignDir
from rl.records import EpisodeRecord
from tests.unit.rl.evidence import synthetic
from tests.unit.rl.evidence.dataset.material import (
    act,
    compacted_episode,
    load,
    replace,
    said,
)


def test_chats_of_solved_episodes(campaign: CampaignDir, tmp_path: Path) -> None:
    of = synthetic.task("train", 0)
    replace(
        campaign,
        [
            compacted_episode("x-a0", "x"),
            compacted_episode("x-a1", "x", reward=0.5),
            synthetic.episode("x-a2", "x", of, 0, turns=[act("one")]),
        ],
    )
    build([campaign], tmp_path / "out", Request(unaudited=True, sft=True))
    loaded = load(tmp_path / "out", tmp_path / "cache", "sft")
    assert list(loaded) == ["train"]
    rows = list(loaded["train"])
    assert [(row["attempt_id"], row["branch"]) for row in rows] == [
        ("x-a0", 0), ("x-a0", 1), ("x-a2", 0),
    ]  # fmt: skip
    assert said(rows[0]["messages"])[-2:] == ["user: sum up", "assistant: I did it"]
    assert said(rows[1]["messages"])[2:] == [
        "user: you did it",
        "assistant: two",
        "user: out of two\n[exit status 0]",
        "assistant: three",
        "user: out of three\n[exit status 0]",
        "assistant: four",
    ]
    assert [set(message) for message in rows[2]["messages"]] == [{"role", "content"}] * 3


def test_preference_pairs(campaign: CampaignDir, tmp_path: Path) -> None:
    of = synthetic.task("train", 0)

    def one(name: str, reward: float, text: str, group: str = "x") -> EpisodeRecord:
        return synthetic.episode(f"{group}-{name}", group, of, 0, reward=reward, turns=[act(text)])

    replace(
        campaign,
        [
            one("bad1", 0.0, "no"), one("good1", 1.0, "yes"), one("good2", 1.0, "aye"),
            one("good3", 1.0, "yes"),  # says what another solved one says
            one("bad2", 0.0, "yes"),  # says what a solved one says
            one("bad3", 0.5, "half"),
            one("good", 1.0, "yes", "solved"), one("bad", 0.0, "no", "unsolved"),
            compacted_episode("c-good", "c"), one("bad", 0.0, "no", "c"),
        ],
    )  # fmt: skip
    for most, count in ((1, 1), (4, 4), (99, 5)):
        out = tmp_path / f"out{most}"
        build([campaign], out, Request(unaudited=True, preferences=True, pairs_per_group=most))
        rows = list(load(out, tmp_path / "cache", "preferences")["train"])
        assert len(rows) == count
        for row in rows:
            assert said(row["prompt"]) == [
                "system: Reply with one bash code block.",
                f"user: Do {of.name}.",
            ]
            assert row["chosen"] != row["rejected"]
            assert row["chosen_reward"] == 1.0 > row["rejected_reward"]
    assert [(row["chosen_attempt_id"], row["rejected_attempt_id"]) for row in rows] == [
        ("x-good1", "x-bad1"), ("x-good2", "x-bad2"), ("x-good2", "x-bad3"),
        ("x-good1", "x-bad3"), ("x-good2", "x-bad1"),
    ]  # fmt: skip
