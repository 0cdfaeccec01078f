"""Writes a campaign's evidence while it runs, and closes it after a crash.

Invariants:
- A dispatch is recorded before its attempt is handed to a worker, and an
  attempt's terminal record is on disk before anything is decided from it.
- An `ended` event follows each terminal record, with the digest of its line.
- `reconcile` gives every attempt that was dispatched and never ended, because
  the driver died, its one terminal record: cancelled.
- Rows of updates past the resumed checkpoint are set aside, never deleted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from rl.evidence.events import (
    BEGIN,
    DISPATCH,
    ENDED,
    EVAL_OVER,
    PINNED,
    PUBLISH,
    EventLog,
    read_events,
)
from rl.evidence.layout import CampaignDir
from rl.evidence.lifecycle import Lifecycle
from rl.evidence.rows import TrainedGroup, UpdateRow
from rl.evidence.traces import TraceWriter, parse_record, read_frames
from rl.files import sha256_file
from rl.records import AttemptSpec, EpisodeRecord, Group, Publication, UpdateMetrics


class Recorder:
    """The one writer of a campaign's directory.

    Args:
        directory: the campaign; torn tails are repaired first.
    """

    def __init__(self, directory: CampaignDir) -> None:
        self.directory = directory
        self.repaired = directory.repair()
        self.events = EventLog(directory.events)
        self.lifecycle = Lifecycle(directory.lifecycle_rows())
        failed = directory.failed_trace  # held open: a second driver is refused here
        self._traces: dict[Path, TraceWriter] = {failed: TraceWriter(failed)}
        self._metrics = directory.metrics_rows()
        self._updates = directory.update_rows()

    def begin(self) -> int:
        """Record that a driver takes over; returns how many did before.

        The number is part of group ids, so that a group that is drawn again after
        any interruption never reuses an id.
        """
        before = sum(event.kind == BEGIN for event in read_events(self.directory.events))
        self.events.append(BEGIN, incarnation=before, frozen=sha256_file(self.directory.frozen))
        self.lifecycle.incarnation = before
        return before

    def pinned(self, path: Path) -> None:
        """A file of the run is written, and not changed from here on."""
        self.events.append(PINNED, file=path.name, sha256=sha256_file(path))

    def close(self) -> None:
        """Release the traces."""
        for trace in self._traces.values():
            trace.close()

    def dispatched(self, spec: AttemptSpec) -> None:
        """An attempt is about to be handed to a worker."""
        self.events.append(
            DISPATCH,
            attempt_id=spec.attempt_id,
            group_id=spec.group_id,
            task=spec.task.name,
            digest=spec.task.digest,
            version=spec.version,
            replica=spec.replica,
            stage=spec.stage,
            arm=spec.arm,
            adapter_sha256=spec.adapter_sha256,
        )

    def finished(self, record: EpisodeRecord) -> None:
        """An attempt came to its one end; what was not graded is kept apart."""
        directory = self.directory
        graded = record.outcome == "graded"
        path = directory.trace(record.stage) if graded else directory.failed_trace
        if path not in self._traces:
            self._traces[path] = TraceWriter(path)
        self._ended(record, self._traces[path].append(record))

    def published(self, publication: Publication) -> None:
        """A version became current."""
        self.events.append(
            PUBLISH,
            version=publication.version,
            seconds=publication.seconds,
            replicas=list(publication.replicas),
            failed={str(key): failure.why for key, failure in publication.failed.items()},
            parts={str(key): dict(value) for key, value in publication.parts.items()},
        )

    def updated(self, metrics: UpdateMetrics, groups: Iterable[Group], adapter: str) -> None:
        """An update was made, from these groups."""
        trained = [
            TrainedGroup(
                group_id=group.group_id,
                version=group.version,
                attempt_ids=[episode.attempt_id for episode in group.episodes],
            )
            for group in groups
        ]
        self._updates.append(
            UpdateRow(update=metrics.update, groups=trained, adapter_sha256=adapter)
        )
        self._metrics.append(metrics)

    def reconcile(self, updates_done: int) -> tuple[int, int]:
        """After a driver's death: (attempts closed as cancelled, rows set aside)."""
        events = read_events(self.directory.events)
        told = {str(event.fields["attempt_id"]) for event in events if event.kind == ENDED}
        ended: set[object] = set()
        for path in self.directory.traces:
            for frame in read_frames(path):
                record = parse_record(frame, path)
                ended.add(record.attempt_id)
                if record.attempt_id not in told:
                    self._ended(record, frame.sha256)
        lost = 0
        for event in events:
            fields = event.fields
            if event.kind != DISPATCH or fields["attempt_id"] in ended:
                continue
            self.finished(_cancelled(fields))
            lost += 1
        return lost, self.directory.rewind(updates_done)

    def close_evals(
        self, versions: Iterable[int], cells: int, why: str, current: int | None = None
    ) -> None:
        """Tell of evaluations whose end is not told of; `why` says what kept them from it.

        That of the `current` version goes on, unless nothing of it is missing.
        """
        events = read_events(self.directory.events)
        told = [event.fields["version"] for event in events if event.kind == EVAL_OVER]
        superseded = self.directory.superseded_adapters()
        counts = Counter(
            record.version
            for record in self.directory.episodes("eval")
            if record.outcome == "graded" and record.adapter_sha256 not in superseded
        )
        for version in versions:
            graded = counts[version]
            if version in told or (version == current and graded < cells):
                continue
            reason = "" if graded >= cells else why
            self.events.append(
                EVAL_OVER, version=version, graded=graded, cells=cells, reason=reason
            )

    def _ended(self, record: EpisodeRecord, sha256: str) -> None:
        """Tell of a record that is on disk, so that an edit of either is seen."""
        self.events.append(
            ENDED,
            attempt_id=record.attempt_id,
            outcome=record.outcome,
            reward=record.reward,
            sha256=sha256,
        )


def _cancelled(fields: Mapping[str, object]) -> EpisodeRecord:
    """The terminal record of an attempt that died with its driver."""
    return EpisodeRecord.model_validate(
        {
            "attempt_id": fields["attempt_id"],
            "group_id": fields["group_id"],
            "task_name": fields["task"],
            "task_digest": fields["digest"],
            "version": fields["version"],
            "stage": fields.get("stage", "train"),
            "arm": fields["arm"],
            "adapter_sha256": fields["adapter_sha256"],
            "replica": fields["replica"],
            "outcome": "cancelled",
            "stop_reason": "cancelled",
            "started_at": time.time(),
        }
    )
