"""The model finds the bugs that it is there to find."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.schedule_model.mutants import Edit, NotOnce, hunt, mutated


@dataclass(frozen=True)
class Mutant:
    """A seeded bug and the rule that it breaks."""

    name: str
    breaks: str
    edits: tuple[Edit, ...]


def mutant(name: str, breaks: str, file: str, old: str, new: str, *more: Edit) -> Mutant:
    return Mutant(name, breaks, (Edit(file, old, new), *more))


MUTANTS = [
    mutant(
        "window_admits_one_too_many",
        "ahead of the trainer|can be placed",
        "window.py",
        "return due >= self._forming and self.slack(due) > 0",
        "return due >= self._forming and self.slack(due) >= 0",
    ),
    mutant(
        "window_forgets_the_forming_batch",
        "ahead of the trainer|can be placed",
        "window.py",
        "(update - self._forming + 1) - self._placed",
        "(update - self._forming + 1)",
    ),
    mutant(
        "newer_group_takes_a_place_owed_to_an_older_one",
        "can be placed",
        "window.py",
        "return not self.full and all(self.slack(d) > 0 for d in range(self._forming, due))",
        "return not self.full",
    ),
    mutant(
        "step_before_the_batch_is_full",
        "a batch is whole",
        "window.py",
        "return self._placed == self._batch",
        "return self._placed >= max(1, self._batch - 1)",
    ),
    mutant(
        "version_current_before_its_loads",
        "is current before its loads",
        "ledger.py",
        "if version is None or lagging or not self._live:",
        "if version is None or not self._live:",
    ),
    mutant(
        "version_current_before_its_update",
        "is not current before its update",
        "scheduler.py",
        "if version > self._finished:",
        "if version > self._finished + 1:",
    ),
    mutant(
        "lease_is_forgotten",
        "is retired when nobody holds it",
        "scheduler.py",
        "        self._leases.release(group.version, group.group_id)\n",
        "",
    ),
    mutant(
        "version_retired_despite_a_lease",
        "nobody holds version",
        "leases.py",
        "if version != self._current and not holders",
        "if version != self._current",
    ),
    mutant(
        "staleness_counted_from_completion",
        "staleness 2 .* is within the bound|can be placed",
        "scheduler.py",
        "            self._complete.setdefault(group.due, deque()).append(group)\n",
        "            self._window.close(group.due)\n"
        "            group.version = self._version or 0\n"
        "            group.due = self._window.admit(group.version)\n"
        "            self._complete.setdefault(group.due, deque()).append(group)\n",
    ),
    mutant(
        "pool_accepts_a_proof_of_a_past_generation",
        "can run|has proven version",
        "replicas.py",
        "if generation != replica.generation:",
        "if generation > replica.generation:",
    ),
    mutant(
        "ledger_accepts_a_proof_of_a_past_generation",
        "counts for it alone",
        "ledger.py",
        "if generation != self._generation[replica]:",
        "if generation > self._generation[replica]:",
    ),
    mutant(
        "ledger_keeps_proofs_of_a_lost_replica",
        "is unloaded where it is served",
        "ledger.py",
        "        self._proven[replica].clear()\n",
        "",
    ),
    mutant(
        "relaunch_under_the_current_version",
        "has one version",
        "scheduler.py",
        "Dispatch(attempt_id, group.group_id, group.task, group.version, replica)",
        "Dispatch(attempt_id, group.group_id, group.task, self._version or 0, replica)",
    ),
    mutant(
        "attempt_finished_twice",
        "has one terminal event",
        "scheduler.py",
        "        del self._attempts[attempt_id]\n",
        "",
        Edit("groups.py", "if attempt_id not in self.running:", "if False:"),
        Edit("groups.py", "self.running.remove(attempt_id)", "self.running.discard(attempt_id)"),
    ),
    mutant(
        "ended_attempt_keeps_its_slot",
        "knows what runs",
        "scheduler.py",
        "        del self._attempts[attempt_id]\n",
        "",
    ),
    mutant(
        "masked_attempt_is_lost",
        "gets the attempts it is owed",
        "groups.py",
        "            self.waiting += 1\n",
        "",
    ),
    mutant(
        "group_given_up_while_it_can_be_saved",
        "only if its group is hopeless|gets the attempts it is owed",
        "groups.py",
        "len(self.running) + self.waiting >= graded",
        "len(self.running) >= graded",
    ),
    mutant(
        "refill_limit_ignored",
        "no more refills",
        "scheduler.py",
        "elif group.zero_variance and self._refills_left > 0:",
        "elif group.zero_variance:",
    ),
    mutant(
        "frontier_forgets_placed_groups",
        "no draw is lost",
        "scheduler.py",
        "untrained = [*self._groups.values(), *self._placed]",
        "untrained = [*self._groups.values()]",
    ),
    mutant(
        "frontier_forgets_opened_draws",
        "no draw is lost",
        "scheduler.py",
        "sorted({*self._backlog.owed, *(group.draw for group in untrained)})",
        "sorted({group.draw for group in untrained})",
    ),
    mutant(
        "ids_come_back_after_a_resume",
        "is a new id",
        "scheduler.py",
        "{draw:05d}.{self._incarnation}",
        "{draw:05d}.0",
    ),
    mutant(
        "attempt_streamed_before_its_group_is_due",
        "only if its group is due|is being formed",
        "scheduler.py",
        "            if group.due == self._window.forming and not group.complete:\n"
        "                self._early.append(",
        "            if not group.complete:\n                self._early.append(",
    ),
    mutant(
        "due_attempts_not_streamed_after_a_step",
        "is due and streamed at once",
        "scheduler.py",
        "for attempt_id in group.rewards\n",
        "for attempt_id in ()\n",
    ),
    mutant(
        "suspended_replica_gets_work",
        "can run",
        "replicas.py",
        "and version in replica.versions and not replica.suspended:",
        "and version in replica.versions:",
    ),
    mutant(
        "load_of_ended_attempts_stays",
        "least loaded",
        "scheduler.py",
        "        self._pool.gave(attempt.replica)\n",
        "",
    ),
    mutant(
        "loss_strands_attempts_that_wait",
        "as it is hopeless|retired when nobody holds",
        "scheduler.py",
        "        self._unserved = True\n        return self._pool.lost(replica)",
        "        return self._pool.lost(replica)",
    ),
    mutant(
        "late_news_of_an_older_version_ignored",
        "as it is hopeless|only if its group is hopeless|least loaded|no slot is idle",
        "scheduler.py",
        " or version in self._leases.offered:",
        ":",
    ),
    mutant(
        "hopeless_attempts_run_on",
        "as it is hopeless",
        "scheduler.py",
        "            group.hopeless = True\n            self._given_up.extend(",
        "            group.hopeless = True\n            list(",
    ),
    mutant(
        "unserved_attempts_wait_for_ever",
        "something can still happen|retired when nobody holds|as it is hopeless",
        "scheduler.py",
        "                if group.waiting:\n                    self._abandon(group)\n",
        "                pass\n",
    ),
    mutant(
        "evaluation_holds_no_version",
        "no lease|not retired|nobody holds",
        "scheduler.py",
        "            self._leases.acquire(version, _evaluation(version))\n",
        "            pass\n",
    ),
    mutant(
        "end_of_an_evaluation_is_not_told",
        "is told|nobody holds",
        "scheduler.py",
        "            self._evaluated.append(end)\n",
        "            pass\n",
    ),
    mutant(
        "evaluations_take_slots_that_are_not_there",
        "no more attempts than slots",
        "scheduler.py",
        "while self.in_flight < self._slots and version in",
        "while version in",
    ),
    mutant(
        "masked_attempt_of_an_evaluation_is_relaunched_too_often",
        "is owed an attempt|nothing of an ended|is told",
        "evals.py",
        "before < self._plan.retries",
        "before <= self._plan.retries",
    ),
    mutant(
        "graded_cells_are_evaluated_again",
        "is owed an attempt|is under evaluation",
        "evals.py",
        "if cell not in done]",
        "]",
    ),
]


@pytest.mark.parametrize("case", MUTANTS, ids=lambda case: case.name)
def test_the_model_catches(case: Mutant, tmp_path: Path) -> None:
    with mutated(case.name, case.edits, tmp_path) as machines:
        found = hunt(machines)
    assert found, "the mutant survives"
    assert re.search(case.breaks, found), found


def test_the_model_finds_nothing_in_an_unmutated_copy(tmp_path: Path) -> None:
    with mutated("of_nothing", (), tmp_path) as machines:
        assert machines.scheduler.__module__ == "mutant_of_nothing.scheduler"
        assert hunt(machines) == ""


def test_a_mutant_that_no_longer_fits_the_source_says_so(tmp_path: Path) -> None:
    edit = Edit("window.py", "no such text", "")
    with pytest.raises(NotOnce, match="holds this 0 times"), mutated("gone", (edit,), tmp_path):
        pass
