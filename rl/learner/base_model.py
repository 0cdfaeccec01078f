"""Obtain the base model of a configuration, once.

Invariants:
- A model is pinned before it is used: a packaged one by sha256, one of the hub
  by its full commit; what lies in the returned directory is complete.
- A packaged model's directory appears under its final name only when it is
  whole; two processes that want it at the same time make it once.
- This process never imports torch: a conversion runs in a child of its own.
"""

from __future__ import annotations

import fcntl
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from rl.config import ModelConfig
from rl.errors import (
    CampaignError,
    ConfigurationError,
    DeadlineExceeded,
    InfrastructureError,
)
from rl.files import disk_errors, sha256_files

_LOG = logging.getLogger(__name__)

# A conversion takes 20 s on two idle cores, mostly imports; a busy machine gets far more.
CONVERSION_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.2
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A base model, ready to be loaded by engine and trainer."""

    path: Path
    name: str
    files: dict[str, str]
    """sha256 by file name, of every file in `path`."""


def prepare_model(config: ModelConfig, root: Path) -> PreparedModel:
    """The base model that `config` pins, obtained or converted if it is not there yet.

    Args:
        config: the configuration's model section.
        root: directory under which converted models are kept.

    Raises:
        ConfigurationError: the pin, the repository or the directory is wrong.
        InfrastructureError: the hub can't be reached, or the disk is full.
    """
    if config.source == "packaged":
        path, files = _packaged_model(config, root)
    elif config.source == "hub":
        path = _hub_model(config)
        files = sha256_files(path)
    else:
        path = expanded(config.path or "", "model.path")
        require_model(path, "give model.path a Hugging Face model directory")
        files = sha256_files(path)
    return PreparedModel(path=path.resolve(), name=config.name, files=files)


def expanded(path: str, key: str) -> Path:
    """The path that a configuration names, with its `~` or `~user` replaced."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigurationError(
            "this machine knows no home directory for it", path, f"write {key} out in full"
        ) from None


def check_model(config: ModelConfig) -> str:
    """Check the pin as far as that needs no download and no conversion; says how far.

    Raises:
        ConfigurationError: the packaged file or the directory is not what is pinned.
    """
    if config.source == "packaged":
        from rl.learner.convert import packaged_gguf  # torch-free

        return f"{packaged_gguf(config.name, config.sha256 or '').name} has the pinned sha256"
    if config.source == "path":
        path = expanded(config.path or "", "model.path")
        require_model(path, "give model.path a Hugging Face model directory")
        return "the directory is complete"
    return f"pinned at commit {config.revision}; it is fetched when the campaign starts"


def _packaged_model(config: ModelConfig, root: Path) -> tuple[Path, dict[str, str]]:
    digest = config.sha256 or ""
    out = root / "models" / f"{config.name}-{config.dtype}-{digest[:8]}"
    with disk_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    with _lock(out.parent / ".lock"):
        if not out.exists():
            _LOG.info("converting %s for the first time, which takes about a minute", config.name)
            _in_child(_convert, config.name, digest, out, config.dtype)
        return out, _verified_conversion(out, digest)


def _convert(name: str, sha256: str, out: Path, dtype: str) -> None:
    """Runs in the child."""
    os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1", TRANSFORMERS_VERBOSITY="error")
    from rl.learner.convert import convert_gguf, packaged_gguf
    from rl.learner.durable import clear_temporary

    clear_temporary(out.parent)  # the lock makes this process the only writer
    convert_gguf(packaged_gguf(name, sha256), out, "bfloat16" if dtype == "bfloat16" else "float32")


def _verified_conversion(out: Path, source_sha256: str) -> dict[str, str]:
    """sha256 by file of a conversion that is what its manifest says."""
    marker = out / "conversion.json"
    remedy = f"remove it and prepare the model again: rm -r {out}"
    try:
        manifest = json.loads(marker.read_text(encoding="utf-8"))
        source, expected = manifest["source_sha256"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigurationError("has no valid conversion.json", str(out), remedy) from None
    if source != source_sha256:
        raise ConfigurationError("was converted from another file", str(out), remedy)
    found = sha256_files(out)
    for name, digest in expected.items():
        if name not in found:
            raise ConfigurationError(f"{name} is missing", str(out), remedy)
        if found[name] != digest:
            raise ConfigurationError(f"{name} has changed since the conversion", str(out), remedy)
    return found


def _hub_model(config: ModelConfig) -> Path:
    # Imported late: they cost half a second, and only this source needs them.
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"{config.name} at {config.revision}"
    cache = constants.HF_HUB_CACHE
    remedy = (
        f"connect this machine to the hub, or put the snapshot into its cache ({cache}) from "
        f"one that is: hf download {config.name} --revision {config.revision}"
    )
    try:
        path = Path(
            snapshot_download(config.name, revision=config.revision, allow_patterns=list(HUB_FILES))
        )
    except HFValidationError:
        raise ConfigurationError(
            "the hub has no repositories of such a name",
            config.name,
            "give model.name as OWNER/NAME, of letters, digits, '-', '_' and '.'",
        ) from None
    except GatedRepoError:
        raise ConfigurationError(
            "the repository is gated and this machine has no access", where, "hf auth login"
        ) from None
    except LocalEntryNotFoundError:
        raise InfrastructureError(
            f"the hub can't be reached and its cache {cache} has no such snapshot", where, remedy
        ) from None
    except (RepositoryNotFoundError, RevisionNotFoundError):
        raise ConfigurationError(
            "the hub has no such repository or commit", where, "correct model.name and .revision"
        ) from None
    except (OSError, httpx.HTTPError) as error:  # a full disk, or any answer or break of the hub
        if isinstance(error, OSError) and error.errno is not None:
            with disk_errors(Path(cache)):
                raise
        raise InfrastructureError(f"the download failed: {error}", where, remedy) from error
    require_model(path, f"the snapshot is incomplete: {remedy}")
    return path


def require_model(path: Path, remedy: str) -> None:
    """Refuse a directory that is no complete Hugging Face model."""
    if not path.is_dir():
        raise ConfigurationError("no such model directory", str(path), remedy)
    for name in ("config.json", "tokenizer.json"):
        if not (path / name).is_file():
            raise ConfigurationError(f"{name} is missing", str(path), remedy)
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = {str(name) for name in weights.values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigurationError("not a valid index of shards", str(index), remedy) from None
        missing = sorted(name for name in shards if not (path / name).is_file())
        if missing:
            raise ConfigurationError(f"{', '.join(missing)} is missing", str(path), remedy)
    elif not any(path.glob("*.safetensors")):
        raise ConfigurationError("it has no *.safetensors file", str(path), remedy)


@contextmanager
def _lock(path: Path) -> Generator[None]:
    """Hold `path` alone; the kernel lets go when the holder dies."""
    limit = time.monotonic() + CONVERSION_TIMEOUT_S
    with disk_errors(path):
        file = path.open("w")
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise DeadlineExceeded(
                        f"another process has held it for {CONVERSION_TIMEOUT_S:.0f} s",
                        str(path),
                        "end the other process and try again",
                    ) from None
                time.sleep(LOCK_POLL_S)
        yield


def _in_child(function: Callable[..., None], *arguments: object) -> None:
    """Run `function` in a fresh process; its typed errors are raised here."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(
        target=_report_to, args=(sending, function, arguments), daemon=True, name="convert"
    )
    child.start()
    sending.close()
    try:
        child.join(CONVERSION_TIMEOUT_S)
        if child.is_alive():
            raise DeadlineExceeded(
                f"the conversion took over {CONVERSION_TIMEOUT_S:.0f} s",
                "rl.prepare model",
                "try again while the machine is less busy",
            )
        error = receiving.recv() if receiving.poll() else None
    except EOFError:
        error = None
    finally:
        child.kill()
        child.join()
        receiving.close()
    if isinstance(error, CampaignError):
        raise error
    if child.exitcode != 0:
        raise InfrastructureError(
            f"the conversion ended with exit code {child.exitcode}",
            "rl.prepare model",
            "its own output stands above; a negative code is a signal (-9: out of memory)",
        )


def _report_to(
    sending: Connection, function: Callable[..., None], arguments: Sequence[object]
) -> None:
    try:
        function(*arguments)
    except CampaignError as error:
        sending.send(error)
    except KeyboardInterrupt:
        sys.exit(1)  # the parent was interrupted as well, and says so
