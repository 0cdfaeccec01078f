"""The modelled replicas and the broadcaster's shell around the ledger under test.

It does what `actors.broadcaster` does, one step at a time, so that anything else
can happen between two steps: a publication loads on every target, then counts the
results and commits; publications, rejoins and retirements take turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rl.errors import StalenessViolation
from rl.schedule.ledger import VersionLedger
from tests.support.schedule_model.setting import require


@dataclass(slots=True)
class Replica:
    """One replica, as it is and as the training loop knows it.

    Attributes:
        life: how often the scheduler was told that it is lost.
        told: the life that the broadcaster knows of.
        down: lost, and not back since.
        restart: where its restart stands; "" if none is under way.
        known: versions that the scheduler knows it to serve in this life.
        live: whether the broadcaster has it in rotation.
    """

    life: int = 0
    told: int = 0
    down: bool = False
    restart: str = ""
    suspended: bool = False
    known: set[int] = field(default_factory=set[int])
    live: bool = True


@dataclass(frozen=True)
class Published:
    """The end of a publication, as the training loop will hear of it."""

    version: int
    serving: dict[int, int]
    failed: dict[int, int]  # with generations, as in `serving`


@dataclass(frozen=True)
class Back:
    """A rejoined replica, as the training loop will hear of it."""

    replica: int
    version: int
    generation: int


class Fleet:
    """Replicas, broadcaster and the news between them and the training loop."""

    def __init__(self, ledger: VersionLedger, count: int) -> None:
        self.ledger = ledger
        self.replicas = [Replica() for _ in range(count)]
        self.proofs: set[tuple[int, int, int]] = set()  # replica, version, life
        self.publishing: int | None = None
        self.loading: dict[int, int] = {}  # targets without a result, with their generations
        self.results: dict[int, tuple[int, bool]] = {}
        self.rejoining: tuple[int, int] | None = None  # a replica and its generation
        self.published: list[Published] = []
        self.back: list[Back] = []
        self.unretired: list[int] = []
        self.current: int | None = None

    @property
    def locked(self) -> bool:
        """Whether a publication or a rejoin is under way."""
        return self.publishing is not None or self.rejoining is not None

    def proven(self, replica: int, version: int) -> bool:
        """Whether the replica has loaded and proven `version` in its current life."""
        return (replica, version, self.replicas[replica].life) in self.proofs

    def served(self) -> set[int]:
        """Versions that the scheduler knows a replica for."""
        return {version for replica in self.replicas for version in replica.known}

    def eligible(self, version: int) -> list[int]:
        """Replicas that an attempt under `version` may be sent to."""
        return [
            index
            for index, replica in enumerate(self.replicas)
            if version in replica.known and not replica.suspended
        ]

    def _prove(self, replica: int, version: int, life: int) -> None:
        if life >= self.replicas[replica].told:
            self.proofs.add((replica, version, life))

    # ---- the broadcaster ------------------------------------------------

    def begin(self, version: int) -> None:
        """A publication starts."""
        targets = self.ledger.begin(version)
        expected = {i: r.told for i, r in enumerate(self.replicas) if r.live}
        require(targets == expected, f"version {version} is loaded by every live replica")
        self.publishing = version
        self.loading = targets
        self.results = {}
        if not targets:
            self._published()

    def loaded(self, replica: int, proven: bool) -> None:
        """A target of the publication has loaded the version and proven it, or has not."""
        version = self.publishing
        assert version is not None
        generation = self.loading.pop(replica)
        self.results[replica] = (generation, proven)
        if proven:
            self._prove(replica, version, generation)
        if not self.loading:
            self._published()

    def _published(self) -> None:
        version = self.publishing
        assert version is not None
        for index, (generation, proven) in self.results.items():
            if proven:
                accepted = self.ledger.proven(version, index, generation)
                current = self.replicas[index].told == generation
                require(accepted == current, f"a proof of life {generation} counts for it alone")
            else:
                self.ledger.failed(index)
                self.replicas[index].live = False
        serving = self.ledger.serving(version)
        if serving:
            require(self.ledger.commit() == version, "the begun version is committed")
            self._committed(version)
        failed = {index: life for index, (life, proven) in self.results.items() if not proven}
        self.published.append(Published(version, serving, failed))
        self.publishing = None
        self.results = {}
        self._retire()

    def _committed(self, version: int) -> None:
        require(self.current is None or version > self.current, "versions only go forward")
        self.current = version
        for index, replica in enumerate(self.replicas):
            if replica.live:
                require(
                    (index, version, replica.told) in self.proofs,
                    f"live replica {index} has proven version {version} before it is current",
                )

    def tell(self, replica: int) -> None:
        """The broadcaster hears that the replica was lost; the replica restarts."""
        book = self.replicas[replica]
        self.ledger.lost(replica, book.life)
        book.told = book.life
        self.proofs = {(r, v, life) for r, v, life in self.proofs if r != replica}
        book.live = False
        book.restart = "rejoin"

    def rejoin(self, replica: int) -> bool:
        """A restarted replica starts to load the current version, if there is one."""
        if self.ledger.current is None:
            return False
        self.rejoining = (replica, self.ledger.generation(replica))
        self.replicas[replica].restart = "loading"
        return True

    def rejoined(self, proven: bool) -> bool:
        """The load of a rejoin has ended; returns whether the replica is in rotation."""
        assert self.rejoining is not None
        replica, generation = self.rejoining
        book = self.replicas[replica]
        version = self.ledger.current
        assert version is not None
        self.rejoining = None
        accepted = False
        if proven:
            self._prove(replica, version, generation)
            accepted = self.ledger.proven(version, replica, generation)
            require(
                accepted == (generation == book.told),
                f"a proof of life {generation} counts for it alone",
            )
        if accepted:
            book.live = True
            self.back.append(Back(replica, version, generation))
        self._retire()
        return accepted

    def retire(self, version: int) -> None:
        """The scheduler wants a version unloaded."""
        self.unretired.append(version)
        if not self.locked:
            self._retire()

    def _retire(self) -> None:
        for version in self.unretired:
            holders = set(self.ledger.retire(version))
            expected = {
                index
                for index, replica in enumerate(self.replicas)
                if replica.live and (index, version, replica.told) in self.proofs
            }
            require(holders == expected, f"version {version} is unloaded where it is served")
            self.proofs = {proof for proof in self.proofs if proof[1] != version}
        self.unretired = []

    # ---- what the training loop tells the scheduler ---------------------

    def hear(self, version: int, serving: dict[int, int]) -> None:
        """The scheduler was told who serves `version`."""
        for index, generation in serving.items():
            if generation == self.replicas[index].life:
                self.replicas[index].known.add(version)

    def check(self) -> None:
        """What holds between any two events."""
        live = tuple(index for index, replica in enumerate(self.replicas) if replica.live)
        require(self.ledger.live == live, "only who proved itself since its loss is live")
        require(self.ledger.current == self.current, "only a commit makes a version current")
        for index, replica in enumerate(self.replicas):
            for version in replica.known:
                require(
                    self.proven(index, version),
                    f"replica {index} has proven version {version} in this life",
                )
        if self.loading:
            try:
                self.ledger.commit()
            except StalenessViolation:
                return
            require(False, f"version {self.publishing} is current before its loads")
