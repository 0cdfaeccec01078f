"""Adapters as directories that an engine can load.

Invariants:
- A directory with its final name is complete and synced: it is written under
  another name in the same place and renamed.
- A file's name is a plain name: nothing is written outside the directory.
"""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree

from rl.errors import EngineError
from rl.files import disk_errors, sync_directory, write_bytes
from rl.records import AdapterBytes, Probe

PROBE_FILE = "probe.json"


def policy_name(version: int) -> str:
    """The name under which policy version `version` is served."""
    return f"policy-v{version}"


def write_adapter(directory: Path, adapter: AdapterBytes, *, with_probe: bool = False) -> None:
    """Write `adapter` as a PEFT directory at `directory`, which must not exist.

    Args:
        directory: its final path; parents are made.
        adapter: the files.
        with_probe: also write the probe, for an engine that only plays a model.

    Raises:
        EngineError: `directory` exists, or a file's name is no plain name.
        InfrastructureError: the disk is full or cannot be written.
    """
    if directory.exists():
        raise EngineError("an adapter's directory is written once", str(directory))
    aside = directory.with_name(f".{directory.name}.partial")
    with disk_errors(directory):
        if aside.exists():
            rmtree(aside)
        aside.mkdir(parents=True)
        for name, content in adapter.files.items():
            if Path(name).name != name:
                raise EngineError(f"'{name}' is no plain file name", str(directory))
            write_bytes(aside / name, content)
        if with_probe:
            write_bytes(aside / PROBE_FILE, _probe_json(adapter.probe))
        aside.rename(directory)
        sync_directory(directory.parent)


def read_adapter(directory: Path, version: int, sha256: str) -> AdapterBytes:
    """What `write_adapter` wrote in `directory`, its probe included.

    Raises:
        EngineError: it has no probe.
    """
    probe = read_probe(directory)
    if probe is None:
        raise EngineError(f"has no {PROBE_FILE}", str(directory))
    files = {path.name: path.read_bytes() for path in directory.iterdir()}
    del files[PROBE_FILE]
    return AdapterBytes(version=version, files=files, sha256=sha256, probe=probe)


def read_probe(directory: Path) -> Probe | None:
    """The probe that `write_adapter` left in `directory`, if any."""
    path = directory / PROBE_FILE
    if not path.exists():
        return None
    return Probe.model_validate_json(path.read_bytes())


def _probe_json(probe: Probe) -> bytes:
    return json.dumps(probe.model_dump(mode="json")).encode()
