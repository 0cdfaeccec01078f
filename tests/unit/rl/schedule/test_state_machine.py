"""Random campaigns of every shape keep every rule and come to an end."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rl.config import ScheduleConfig
from tests.support.schedule_model.explore import finish
from tests.support.schedule_model.setting import Faults, Setting, shared_config
from tests.support.schedule_model.unhurried import unhurried
from tests.support.schedule_model.world import Kind, Move, World

PLENTY = Faults(
    masks=100,
    cancels=100,
    losses=20,
    failed_loads=20,
    restarts=40,
    suspicions=100,
    drivers=5,
)
ANY = st.integers(0, 10**6)


@st.composite
def configs(draw: st.DrawFn) -> ScheduleConfig:
    group = draw(st.integers(2, 4))
    return shared_config(
        draw(st.integers(1, 6)),
        group * draw(st.integers(1, 4)),
        group,
        draw(st.integers(0, 3)),
        draw(st.integers(0, 2)),
        draw(st.integers(2, group)),
        draw(st.integers(0, 2)),
    )


class Campaign(RuleBasedStateMachine):
    """Each rule lets something happen that can; `World` checks what comes of it."""

    world: World

    @initialize(
        config=configs(),
        slots=st.integers(1, 40),
        replicas=st.integers(1, 4),
        steps=st.integers(0, 60),
    )
    def start(self, config: ScheduleConfig, slots: int, replicas: int, steps: int) -> None:
        """Faults may come only after some steps, so that they come late in a campaign too."""
        self.world = World(Setting(config, slots, replicas, rewards=(0.0, 0.5, 1.0)), PLENTY)
        for step in range(steps):
            self.let(step)

    def some(self, *kinds: Kind) -> list[Move]:
        """What can happen of these kinds; of all that is no fault, if none is named."""
        if self.world.over:
            return []
        moves = self.world.moves()
        return [move for move in moves if (move.kind in kinds if kinds else not move.fault)]

    def let(self, which: int, *kinds: Kind) -> None:
        moves = self.some(*kinds)
        if moves:
            self.world.apply(moves[which % len(moves)])

    @rule(seconds=st.floats(0, 1e4))
    def time_passes(self, seconds: float) -> None:
        self.world.clock += seconds

    @rule(choices=st.lists(ANY, min_size=1, max_size=20))
    def campaign_goes_on(self, choices: list[int]) -> None:
        for which in choices:
            self.let(which)

    @rule(choices=st.lists(ANY, min_size=1, max_size=12))
    def attempts_are_graded(self, choices: list[int]) -> None:
        for which in choices:
            self.let(which, "grade")

    @precondition(lambda self: self.some("mask", "cancelled"))
    @rule(which=ANY)
    def attempt_ends_without_a_grade(self, which: int) -> None:
        self.let(which, "mask", "cancelled")

    @precondition(lambda self: self.some("train", "save"))
    @rule()
    def trainer_moves(self) -> None:
        self.let(0, "train", "save")

    @precondition(lambda self: self.some("begin", "tell", "rejoin", "load", "rejoined"))
    @rule(which=ANY)
    def broadcaster_moves(self, which: int) -> None:
        self.let(which, "begin", "tell", "rejoin", "load", "rejoined")

    @precondition(lambda self: self.some("load fails", "rejoin fails"))
    @rule(which=ANY)
    def load_fails(self, which: int) -> None:
        self.let(which, "load fails", "rejoin fails")

    @precondition(lambda self: self.some("hear", "back", "alive"))
    @rule(which=ANY)
    def news_arrives(self, which: int) -> None:
        self.let(which, "hear", "back", "alive")

    @precondition(lambda self: self.some("suspect", "lose"))
    @rule(which=ANY)
    def replica_is_in_trouble(self, which: int) -> None:
        self.let(which, "suspect", "lose")

    @precondition(lambda self: self.world.books.finished > 0)
    @rule(really=st.sampled_from([False] * 7 + [True]))
    def driver_crashes(self, really: bool) -> None:
        if really:
            self.let(0, "crash")

    def teardown(self) -> None:
        """Nothing fails any more: the campaign ends, and its books balance."""
        if not hasattr(self, "world"):
            return
        finish(self.world)
        books, config = self.world.books, self.world.setting.config
        if not self.world.hopeless:
            assert books.finished == config.updates
            assert len(books.trained_draws) == config.updates * config.groups_per_batch
        assert not books.running or self.world.hopeless


TestCampaign = Campaign.TestCase
TestCampaign.settings = settings(unhurried, max_examples=120, stateful_step_count=40)
