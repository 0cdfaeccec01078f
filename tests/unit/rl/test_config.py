"""The configuration refuses what is wrong and says what would be right."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rl.config import CampaignConfig
from rl.config_file import describe, load_config, parse_config, read_toml
from rl.errors import ConfigurationError, TaskPackageError
from rl.screen_config import ScreenConfig

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = sorted((ROOT / "configs").glob("*.toml"))
VALID: dict[str, Any] = {
    "name": "unit",
    "model": {"source": "path", "name": "tiny", "path": "models/tiny"},
    "tasks": {"train": 8, "heldout": 4},
    "agent": {"system_prompt": "Use bash.", "max_turns": 2, "max_new_tokens": 32},
    "episodes": {"concurrency": 8, "deadline_s": 300.0},
    "schedule": {"updates": 2, "batch_size": 8, "group_size": 4},
    "engine": {"replicas": 2, "device": "cpu", "max_num_seqs": 8, "max_model_len": 512},
    "trainer": {"device": "cpu", "optimizer": {"lr": 1e-4}},
    "heldout": {"attempts": 2},
    "limits": {"watchdog_s": 600},
}


def with_value(key: str, value: object) -> dict[str, Any]:
    data = copy.deepcopy(VALID)
    *tables, last = key.split(".")
    table = data
    for name in tables:
        table = table.setdefault(name, {})
    table[last] = value
    return data


def refusal(data: dict[str, Any]) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        parse_config(data, where="campaign.toml")
    return caught.value


def write_toml(path: Path, extra: str = "") -> Path:
    path.write_text(
        f"""
name = "unit"
{extra}
[model]
source = "path"
name = "tiny"
path = "models/tiny"
[tasks]
train = 8
heldout = 4
[agent]
system_prompt = "Use bash."
max_turns = 2
max_new_tokens = 32
[episodes]
concurrency = 8
deadline_s = 300
[schedule]
updates = 2
batch_size = 8
group_size = 4
[engine]
replicas = 2
device = "cpu"
max_num_seqs = 8
max_model_len = 512
[trainer]
device = "cpu"
[trainer.optimizer]
lr = 1e-4
[heldout]
attempts = 2
[limits]
watchdog_s = 600
""",
        encoding="utf-8",
    )
    return path


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        ("schedule.bath_size", "schedule.bath_size'; did you mean 'batch_size'"),
        ("trainer.optimizer.learning_rat", "trainer.optimizer.learning_rat'"),
        ("modle", "modle'; did you mean 'model'"),
        ("group_size", "group_size'; did you mean 'schedule.group_size'"),
        ("engine.zzz", "engine.zzz'; known here: kind, replicas"),
    ],
)
def test_unknown_key_is_named_with_file_and_nearest(key: str, wanted: str) -> None:
    error = refusal(with_value(key, 1))
    assert error.where == "campaign.toml"
    assert f"unknown key '{wanted}" in error.what
    assert error.remedy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schedule.updates", "ten"),
        ("schedule.updates", 0),
        ("schedule.group_size", 1),
        ("agent.temperature", 0.0),
        ("limits.watchdog_s", float("inf")),
        ("limits.watchdog_s", float("nan")),
        ("engine.device", "tpu"),
        ("name", "No Spaces"),
        ("model.revision", "main"),
        ("agent", "a string"),
    ],
)
def test_ill_typed_value_is_named(key: str, value: object) -> None:
    error = refusal(with_value(key, value))
    assert f"'{key}'" in error.what
    assert error.where == "campaign.toml"


def test_missing_section_is_named() -> None:
    data = copy.deepcopy(VALID)
    del data["model"]
    assert "'model'" in refusal(data).what


def test_all_wrong_keys_are_named_at_once() -> None:
    data = with_value("schedule.bath_size", 1)
    data["engine"]["replicas"] = -1
    data["nonsense"] = True
    what = refusal(data).what
    assert all(key in what for key in ("schedule.bath_size", "engine.replicas", "nonsense"))


PRIME = {
    "trainer.backend": "prime-rl",
    "trainer.device": "cuda",
    "trainer.loss.name": "trust_region",
    "trainer.prime.compile": True,
    "resources.trainer_gpus": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"schedule.batch_size": 6}, "not a multiple of group_size"),
        ({"schedule.min_group": 5}, "min_group may not exceed"),
        ({"schedule.max_staleness": 2}, "engine.max_loras"),
        ({"agent.max_new_tokens": 512}, "max_new_tokens must be below"),
        ({"heldout.shards": 3}, "heldout.shards may not exceed engine.replicas"),
        ({"heldout.tasks": 1}, "number of held-out tasks"),
        ({"checkpoints.updates": [1, 3]}, "beyond the last: [3]"),
        ({"engine.kind": "scripted"}, "engine.scripted is given exactly when"),
        ({"limits.function_bound_s": 600}, "watchdog_s must be below"),
        ({"limits.start_s": 600.0}, "limits.start_s must exceed engine.start_timeout_s"),
        ({"limits.drain_s": 30.0}, "must exceed sandbox.stop_timeout_s"),
        ({"limits.stop_s": 30.0}, "must exceed sandbox.stop_timeout_s"),
        ({"episodes.workers": 9}, "workers may not exceed concurrency"),
        ({"model.source": "hub"}, "needs revision"),
        ({"model.source": "packaged"}, "needs sha256"),
        ({"tasks.path": "somewhere"}, "path is given exactly when"),
        ({"tasks.source": "path"}, "path is given exactly when"),
        ({"trainer.shard_base": True}, "set ranks above 1"),
        ({"trainer.device": "cuda", "trainer.ranks": 2}, "as many GPUs"),
        ({**PRIME, "trainer.ranks": 2}, "leave ranks out"),
        ({**PRIME, "trainer.prime.start_timeout_s": 1800.0}, "trainer.prime.start_timeout_s"),
    ],
)
def test_contradiction_is_refused(changes: dict[str, object], wanted: str) -> None:
    data = copy.deepcopy(VALID)
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = data
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    assert wanted in refusal(data).what


def test_valid_configuration_round_trips() -> None:
    config = parse_config(VALID, where="campaign.toml")
    again = parse_config(config.model_dump(mode="json"), where="frozen.json")
    assert again == config
    assert again.digest() == config.digest()


def test_configuration_is_frozen() -> None:
    config = parse_config(VALID, where="campaign.toml")
    with pytest.raises(ValidationError):
        config.seed = 1
    with pytest.raises(ValidationError):
        config.trainer.lora.rank = 8


def test_digest_depends_on_values_alone() -> None:
    config = parse_config(VALID, where="a.toml")
    reordered = parse_config(dict(reversed(VALID.items())), where="b.toml")
    explicit = parse_config(with_value("seed", 0), where="c.toml")
    changed = parse_config(with_value("seed", 1), where="d.toml")
    assert config.digest() == reordered.digest() == explicit.digest() != changed.digest()


def test_digest_is_the_same_in_another_process(tmp_path: Path) -> None:
    path = write_toml(tmp_path / "campaign.toml")
    code = (
        "import sys; from pathlib import Path; from rl.config_file import load_config;"
        "print(load_config(Path(sys.argv[1])).digest())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == load_config(path).digest()


def test_counts_follow_from_the_sections() -> None:
    config = parse_config(VALID, where="campaign.toml")
    assert config.training_episodes == 16
    assert config.schedule.groups_per_batch == 2
    assert config.heldout_tasks == 4
    assert config.heldout_attempts == 16
    fewer = parse_config(with_value("heldout.tasks", 3), where="campaign.toml")
    assert fewer.heldout_tasks == 3


def test_every_key_is_described() -> None:
    rows = dict(describe())
    assert {key for key, text in rows.items() if not text.strip()} == set()
    dumped = parse_config(VALID, where="campaign.toml").model_dump()

    def keys(table: dict[str, Any], prefix: str) -> set[str]:
        found: set[str] = set()
        for name, value in table.items():
            found.add(prefix + name)
            if isinstance(value, dict):
                found |= keys(value, f"{prefix}{name}.")
        return found

    assert keys(dumped, "") <= set(rows)


def test_file_loads_like_its_values(tmp_path: Path) -> None:
    loaded = load_config(write_toml(tmp_path / "campaign.toml"))
    assert loaded == parse_config(VALID, where="campaign.toml")


def test_overrides_replace_values_and_are_validated(tmp_path: Path) -> None:
    path = write_toml(tmp_path / "campaign.toml")
    config = load_config(path, {"seed": 7, "engine.replicas": 4, "trainer.lora.rank": 8})
    assert (config.seed, config.engine.replicas, config.trainer.lora.rank) == (7, 4, 8)
    with pytest.raises(ConfigurationError, match=r"did you mean 'replicas'"):
        load_config(path, {"engine.replica": 4})
    with pytest.raises(ConfigurationError, match="'name' is not a table"):
        load_config(path, {"name.inner": 4})


@pytest.mark.parametrize(
    ("content", "wanted"),
    [(b"name = ", "not valid TOML"), (b"\xff\xfe", "cannot be read"), (None, "no such")],
)
def test_unreadable_file_is_one_message(tmp_path: Path, content: bytes | None, wanted: str) -> None:
    path = tmp_path / "campaign.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=wanted) as caught:
        load_config(path)
    assert caught.value.where == str(path)


def test_directory_as_file_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        ("a = " + "[" * 5000, "nested too deeply"),
        ("a = " + "9" * 5000, "an integer is too long"),
        ("a = 0x" + "f" * 5000, "'a': an integer beyond 64 bits"),
        ("[t]\na = [{b = 99999999999999999999}]", "'t.a.b': an integer beyond 64 bits"),
        ("name = ", "not valid TOML"),
        (b"\xff\xfe", "no UTF-8 text"),
    ],
)
@pytest.mark.parametrize("refusal", [ConfigurationError, TaskPackageError])
def test_toml_that_cannot_be_read_is_one_message_with_a_remedy(
    tmp_path: Path, refusal: type[ConfigurationError], content: str | bytes, wanted: str
) -> None:
    path = tmp_path / "campaign.toml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(refusal, match=wanted) as caught:
        read_toml(path, refusal)
    assert type(caught.value) is refusal
    assert caught.value.where == str(path) and caught.value.remedy
    assert len(str(caught.value)) < 500


FLOATS = [
    "agent.temperature",
    "sandbox.cpus",
    "engine.probe_tolerance",
    "trainer.lora.alpha",
    "trainer.optimizer.lr",
    "trainer.optimizer.eps",
    "trainer.optimizer.weight_decay",
    "trainer.optimizer.clip_norm",
    "trainer.loss.clip_low",
    "trainer.loss.clip_high",
    "trainer.loss.kl_weight",
    "resources.trainer_gpus",
    "limits.stall_s",
    "episodes.deadline_s",
]


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, True, "1", 10**400])
def test_a_float_is_a_finite_number(key: str, value: object) -> None:
    error = refusal(with_value(key, value))
    assert f"'{key}'" in error.what
    assert len(error.what) < 300


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.optimizer.betas", [0.9, 1.0]),
        ("trainer.optimizer.betas", [-0.1, 0.9]),
        ("trainer.optimizer.betas", [float("nan"), 0.9]),
        ("trainer.optimizer.lr", 1.5),
        ("agent.temperature", 2.5),
        ("trainer.loss.clip_low", 1.5),
        ("limits.stall_s", 1e9),
        ("trainer.gradient_checkpointing", 1),
        ("model.name", "a\udcffb"),
        ("agent.system_prompt", "\ud800"),
        ("tasks.path", "a\0b"),
        ("engine.extra_args", ["--x", "\udcff"]),
        ("tasks.families", ["rm", "mv", "rm"]),
    ],
)
def test_a_value_out_of_range_is_refused(key: str, value: object) -> None:
    error = refusal(with_value(key, value))
    assert f"'{key.removesuffix('.families')}" in error.what
    str(error.remedy).encode()


@pytest.mark.parametrize(
    "key", ["seed", "tasks.seed", "schedule.updates", "schedule.max_staleness"]
)
@pytest.mark.parametrize("value", [True, -1, 2**31, 1.0, "1", pytest.param(1 << 20_000, id="huge")])
def test_an_integer_is_an_integer_of_31_bits(key: str, value: object) -> None:
    error = refusal(with_value(key, value))
    assert f"'{key}'" in error.what
    assert len(error.what) < 300


@pytest.mark.parametrize("key", ["seed", "tasks.seed"])
def test_the_greatest_seed_is_accepted(key: str) -> None:
    parse_config(with_value(key, 2**31 - 1), where="campaign.toml")


# The keys that take true and false.
SWITCHES = (
    "trainer.gradient_checkpointing",
    "trainer.shard_base",
    "trainer.streaming",
    "trainer.prime.compile",
    "eval.at_start",
    "modal.dashboard",
)


@pytest.mark.parametrize("key", [key for key, _ in describe() if ".examples." not in key])
def test_no_key_takes_a_number_beyond_all_bounds(key: str) -> None:
    for value in (float("inf"), float("nan"), 2**70):
        assert f"'{key}'" in refusal(with_value(key, value)).what
    if key not in SWITCHES:
        assert f"'{key}'" in refusal(with_value(key, True)).what


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configuration_parses(path: Path) -> None:
    config = load_config(path)
    assert isinstance(config, CampaignConfig)
    assert config.engine.kind == "vllm"


EVALUATED = {"eval": {"interval": 2, "tasks": 2}}


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "screen").glob("*.toml")), ids=str)
def test_shipped_screens_parse(path: Path) -> None:
    config = load_config(path, model=ScreenConfig)
    assert config.lora_rank is None
    assert config.episodes.concurrency >= config.screen.shards


def test_the_reference_screen_has_the_published_numbers() -> None:
    config = load_config(ROOT / "configs" / "screen" / "screen116.toml", model=ScreenConfig)
    assert (config.tasks.cohort, config.screen.shards, config.screen.attempts) == (
        "screen116",
        4,
        8,
    )
    assert config.episodes.concurrency // config.screen.shards == 64
    assert (config.tasks.train, config.tasks.heldout) == (80, 23)


def test_versions_are_evaluated_by_interval_but_not_the_last() -> None:
    base = {**VALID, "engine": {**VALID["engine"], "max_loras": 3}}
    config = parse_config({**base, **EVALUATED}, where="c.toml")
    updates = config.schedule.updates
    assert config.eval_versions == tuple(range(2, updates, 2))
    started = {"eval": {"interval": 2, "at_start": True}}
    assert parse_config({**base, **started}, where="c.toml").eval_versions[0] == 0
    assert parse_config(base, where="c.toml").eval_versions == ()


def test_an_evaluated_version_needs_a_slot_for_its_adapter() -> None:
    error = refusal({**VALID, **EVALUATED})
    assert "engine.max_loras must be at least schedule.max_staleness + 2" in error.what


def test_a_screens_bounds_are_in_order() -> None:
    path = ROOT / "configs" / "screen" / "local.toml"
    with pytest.raises(ConfigurationError, match="low may not exceed high"):
        load_config(path, {"screen.low": 0.9, "screen.high": 0.1}, model=ScreenConfig)
    with pytest.raises(ConfigurationError, match=r"screen\.shards may not exceed"):
        load_config(path, {"screen.shards": 9}, model=ScreenConfig)
    with pytest.raises(ConfigurationError, match="did you mean 'attempts'"):
        load_config(path, {"screen.attempt": 9}, model=ScreenConfig)


def test_a_split_needs_tasks_that_are_given() -> None:
    tasks = {**VALID["tasks"], "split": "selection.json"}
    assert "split is given only when" in refusal({**VALID, "tasks": tasks}).what


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_frozen_configuration_is_a_configuration_file(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    file = tmp_path / "frozen.json"
    file.write_text(config.model_dump_json(), encoding="utf-8")
    assert load_config(file).digest() == config.digest()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{", "not valid JSON"),
        ("[1]", "holds no object"),
        ('{"name": NaN}', "'name'"),
        ('{"seed": 99999999999999999999}', "beyond 64 bits"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_json_that_is_no_configuration_is_one_message(
    tmp_path: Path, text: str, wanted: str
) -> None:
    file = tmp_path / "config.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=wanted) as refused:
        load_config(file)
    assert str(file) in str(refused.value)
