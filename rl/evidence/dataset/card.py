"""The dataset's card: README.md, with the header that the Hub and `load_dataset` read.

Invariants:
- Every set is a configuration, every split of it names its Parquet files; `episodes` is
  the default one.
- The features in the header are those that `datasets` itself would write.
- The numbers are the manifest's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

import pyarrow as pa
import yaml

from rl.errors import EvidenceError
from rl.evidence.dataset.manifest import Manifest, SplitEntry
from rl.evidence.dataset.schema import ArrowSchema, ArrowType, SetName, arrow_schema, column_table

DEFAULT_LICENSE: Final = "other"
_UNNAMED_LICENSE: Final = "not-stated"
_SIZES: Final = (
    (1_000, "n<1K"),
    (10_000, "1K<n<10K"),
    (100_000, "10K<n<100K"),
    (1_000_000, "100K<n<1M"),
    (10_000_000, "1M<n<10M"),
)
_LARGEST: Final = "10M<n<100M"
_FENCE: Final = "---\n"
_ABOUT: Final[dict[SetName, str]] = {
    "episodes": "One row per episode: what was said, the tokens as they were sampled with "
    "their logprobs, and how it was graded.",
    "sft": "Chats of solved training episodes, one row per branch of the context, in the "
    "`messages` format. A later branch repeats its latest turns; summaries that the harness "
    "rejected are left out.",
    "preferences": "Pairs of training episodes of one group, one solved and one not, in the "
    "conversational preference format (`prompt`, `chosen`, `rejected`).",
}


def card(manifest: Manifest) -> str:
    """The whole page."""
    header = yaml.safe_dump(_header(manifest), sort_keys=False, allow_unicode=True)
    return f"{_FENCE}{header}{_FENCE}\n{_body(manifest)}"


def read_header(text: str, where: str) -> dict[str, Any]:
    """The header of a card.

    Raises:
        EvidenceError: there is none, or it is no YAML mapping.
    """
    head, fence, rest = text.partition(_FENCE)
    block, end, _ = rest.partition(f"\n{_FENCE}")
    remedy = "export the dataset again"
    if head or not fence or not end:
        raise EvidenceError("has no YAML header between two lines of ---", where, remedy)
    try:
        header = yaml.safe_load(block)
    except yaml.YAMLError as error:
        problem = str(error).splitlines()[0]
        raise EvidenceError(f"its header is no YAML: {problem}", where, remedy) from None
    if not isinstance(header, dict):
        raise EvidenceError("its header is no mapping", where, remedy)
    return cast("dict[str, Any]", header)


def data_glob(name: str, split: str) -> str:
    """Which files hold a split of a set, as a pattern."""
    return f"data/{name}/{split}-*.parquet"


def features(schema: ArrowSchema) -> list[dict[str, Any]]:
    """The columns as the header's `features` has them."""
    return [{"name": field.name, **_feature(field.type)} for field in schema]


def size_category(rows: int) -> str:
    """The Hub's name for so many rows."""
    return next((name for limit, name in _SIZES if rows < limit), _LARGEST)


def _header(manifest: Manifest) -> dict[str, Any]:
    rows = sum(split.rows for split in manifest.sets["episodes"].values())
    licence = {"license": manifest.options.license}
    if manifest.options.license == DEFAULT_LICENSE:
        licence["license_name"] = _UNNAMED_LICENSE
    return {
        **licence,
        "pretty_name": f"Terminal agent episodes: {', '.join(_run_ids(manifest))}",
        "task_categories": ["text-generation", "reinforcement-learning"],
        "tags": ["terminal", "agents", "trajectories", "harbor", "rl"],
        "size_categories": [size_category(rows)],
        "configs": [
            {
                "config_name": name,
                **({"default": True} if name == "episodes" else {}),
                "data_files": [
                    {"split": split, "path": data_glob(name, split)} for split in splits
                ],
            }
            for name, splits in manifest.sets.items()
        ],
        "dataset_info": [_info(manifest, name, splits) for name, splits in manifest.sets.items()],
    }


def _info(manifest: Manifest, name: str, splits: Mapping[str, SplitEntry]) -> dict[str, Any]:
    files = manifest.files.items()
    return {
        "config_name": name,
        "features": features(arrow_schema(cast(SetName, name))),
        "splits": [
            {"name": split, "num_bytes": entry.memory_bytes, "num_examples": entry.rows}
            for split, entry in splits.items()
        ],
        "download_size": sum(e.bytes for path, e in files if path.startswith(f"data/{name}/")),
        "dataset_size": sum(entry.memory_bytes for entry in splits.values()),
    }


def _feature(kind: ArrowType) -> dict[str, Any]:
    if pa.types.is_list(kind):
        inner = kind.value_type
        if pa.types.is_struct(inner):
            fields = [inner.field(index) for index in range(inner.num_fields)]
            return {"list": [{"name": field.name, **_feature(field.type)} for field in fields]}
        return {"list": _feature(inner)["dtype"]}
    return {"dtype": {"double": "float64"}.get(str(kind), str(kind))}


def _run_ids(manifest: Manifest) -> list[str]:
    return [campaign.run_id for campaign in manifest.campaigns]


def _body(manifest: Manifest) -> str:
    names = cast("list[SetName]", list(manifest.sets))
    return "\n".join(
        [
            "# Terminal agent episodes",
            "",
            "Episodes of a language model that works in a terminal, from reinforcement learning "
            "campaigns whose tasks, configuration, model and code were frozen before the first "
            "one. Training and evaluation tasks are disjoint by content digest, and so are the "
            "splits `train` and `eval`.",
            "",
            "```python",
            "from datasets import load_dataset",
            "",
            'episodes = load_dataset("DIRECTORY OR REPOSITORY")  # splits train and eval',
            *(f'{name} = load_dataset("...", "{name}")' for name in names if name != "episodes"),
            "```",
            "",
            "## Rows",
            "",
            "| set | split | rows |",
            "|---|---|---|",
            *(
                f"| {name} | {split} | {entry.rows} |"
                for name, splits in manifest.sets.items()
                for split, entry in splits.items()
            ),
            "",
            "## Where they come from",
            "",
            *_campaign_table(manifest),
            "",
            *_scrubbed(manifest),
            "",
            *(part for name in names for part in _set_section(name)),
            "## Files",
            "",
            "`data/jsonl/` holds the rows of `data/episodes/` once more, as zstd-compressed JSON "
            "Lines. `manifest.json` has the sha256, bytes and rows of every file, and the exact "
            "versions of everything. `python -m rl.dataset verify DIRECTORY` checks all of it.",
            "",
        ]
    )


def _campaign_table(manifest: Manifest) -> list[str]:
    rows = [
        f"| {_cell(c.run_id)} | {_cell(f'{c.model_name} ({c.model_source}, {c.model_pin})')} "
        f"| {c.train_tasks} | {c.heldout_tasks} | {c.config_digest[:16]} "
        f"| {(c.code_commit or 'not in git')[:12]}{', changed' if c.code_dirty else ''} "
        f"| {'no findings' if c.audited else 'not audited'} |"
        for c in manifest.campaigns
    ]
    titles = "| campaign | model | training tasks | held-out tasks | configuration | code | audit |"
    return [titles, "|---|---|---|---|---|---|---|", *rows]


def _scrubbed(manifest: Manifest) -> list[str]:
    if not manifest.scrubbed:
        return ["No secrets were found in any text."]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(manifest.scrubbed.items()))
    return [
        f"Secrets were replaced by `[REDACTED:kind]` in these places: {kinds}. "
        f"{manifest.rows_without_tokens} episodes have no `samples`, because their tokens may "
        "spell one out."
    ]


def _set_section(name: SetName) -> list[str]:
    return [f"## Set `{name}`", "", _ABOUT[name], "", column_table(name), ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
