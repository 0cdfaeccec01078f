"""What a campaign would do, in words and numbers, without starting anything.

Invariant: a plan is a pure function of the configuration; it needs no model, no
task and no cluster.
"""

from __future__ import annotations

from typing import Any

from rl.config import CampaignConfig
from rl.provision.functions import campaign_functions, functions


def plan(config: CampaignConfig) -> dict[str, Any]:
    """Resources, bounds and counts of a campaign, ready for JSON."""
    schedule, engine, heldout = config.schedule, config.engine, config.heldout
    ahead = (schedule.max_staleness + 1) * schedule.batch_size
    return {
        "name": config.name,
        "config_digest": config.digest(),
        "model": {
            "name": config.model.name,
            "source": config.model.source,
            "pin": config.model.revision or config.model.sha256 or config.model.path,
            "dtype": config.model.dtype,
        },
        "tasks": {
            "source": config.tasks.path or config.tasks.source,
            "train": config.tasks.train,
            "heldout": config.tasks.heldout,
        },
        "training": {
            "updates": schedule.updates,
            "batch_size": schedule.batch_size,
            "group_size": schedule.group_size,
            "episodes": config.training_episodes,
            "max_staleness": schedule.max_staleness,
            "most_episodes_ahead_of_trainer": ahead,
            "loss": config.trainer.loss.name,
            "checkpoints": list(config.checkpoints.updates),
        },
        "evaluation_on_the_way": {
            "versions": list(config.eval_versions),
            "tasks": config.eval_tasks,
            "attempts": len(config.eval_versions) * config.eval_cells,
        },
        "evaluation": {
            "arms": ["base", f"step{schedule.updates}"],
            "tasks": config.heldout_tasks,
            "shards": heldout.shards,
            "attempts_per_task_and_arm": heldout.attempts,
            "attempts": config.heldout_attempts,
        },
        "resources": {
            "gpus_in_all": config.resources.trainer_gpus
            + engine.replicas * config.resources.replica_gpus,
            "nodes": "one that holds everything, else several",
            "trainer": {
                "count": 1,
                "gpus": config.resources.trainer_gpus,
                "cpus": config.resources.trainer_cpus,
                "labels": config.resources.trainer_labels,
            },
            "replicas": {
                "count": engine.replicas,
                "gpus_each": config.resources.replica_gpus,
                "cpus_each": config.resources.replica_cpus,
                "labels": config.resources.replica_labels,
                "max_num_seqs": engine.max_num_seqs,
                "device": engine.device,
            },
            "episode_workers": {
                "count": config.episodes.workers,
                "cpus_each": config.resources.worker_cpus,
                "labels": config.resources.worker_labels,
            },
            "concurrent_episodes": config.episodes.concurrency,
            "sandbox": {
                "provider": config.sandbox.provider,
                "cpus": config.sandbox.cpus,
                "memory_mb": config.sandbox.memory_mb,
                "disk_mb": config.sandbox.disk_mb,
                "created_per_s": config.sandbox.creates_per_s,
            },
        },
        **_rented(config),
        "bounds": {
            "episode_deadline_s": config.episodes.deadline_s,
            "sandbox_create_s": config.sandbox.create_timeout_s,
            "attempt_retries": schedule.attempt_retries,
            "replica_restarts": engine.max_restarts,
            "placement_s": config.limits.placement_s,
            "start_s": config.limits.start_s,
            "checkpoint_s": config.limits.checkpoint_s,
            "stop_s": config.limits.stop_s,
            "update_timeout_s": config.trainer.update_timeout_s,
            "stall_s": config.limits.stall_s,
            "watchdog_s": config.limits.watchdog_s,
            "function_bound_s": config.limits.function_bound_s,
        },
        "stages": [
            "prepare the model and the task packages",
            "freeze configuration, task digests, model and code revision",
            "gate every task: its solution scores 1, doing nothing scores 0",
            "start replicas, broadcaster, episode workers and trainer",
            f"train {schedule.updates} updates, staleness at most {schedule.max_staleness}",
            "verify the last checkpoint by loading it afresh; stop the trainer",
            "evaluate the held-out tasks with base and final weights; stop everything",
            "audit the evidence; write report.html",
        ],
    }


def _rented(config: CampaignConfig) -> dict[str, Any]:
    """What Modal would be asked for."""
    if config.modal is None:
        return {}
    names = campaign_functions(config)
    return {
        "modal": {
            "workspace": config.modal.workspace,
            "environment": config.modal.environment,
            "volumes": [config.modal.state_volume, config.modal.model_volume],
            "secrets": list(config.modal.secrets),
            **{spec.name: spec.row() for spec in functions(config, names)},
        }
    }


def plan_lines(config: CampaignConfig) -> list[str]:
    """The plan for a reader."""
    lines: list[str] = []
    for title, content in plan(config).items():
        if isinstance(content, dict):
            lines.append(f"{title}:")
            lines.extend(f"  {key}: {_words(value)}" for key, value in content.items())
        elif isinstance(content, list):
            lines.append(f"{title}:")
            lines.extend(f"  {number}. {item}" for number, item in enumerate(content, start=1))
        else:
            lines.append(f"{title}: {content}")
    return lines


def _words(value: Any) -> str:
    if isinstance(value, dict):
        if not value:
            return "any"
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(str(inner) for inner in value) or "none"
    return "none" if value is None else str(value)
