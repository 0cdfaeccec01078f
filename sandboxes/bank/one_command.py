"""Tier 1, one command: for each family, what a task says, holds, solves and checks.

Invariants:
- A task is a pure function of its random generator, and uses only its integer
  draws, so it is the same on every machine and version of Python.
- A check reads the outcome, never the method, and fails if a bystander changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandboxes.bank.draw import Draw
from sandboxes.bank.task import Files
from sandboxes.bank.words import FOLDERS, SCRIPT_SUFFIXES, THINGS


@dataclass(frozen=True, slots=True)
class Draft:
    """One task before it is written: all names are relative to the working directory.

    Attributes:
        label: words for the package's name.
        instruction: what the agent is told.
        files: set-up files and their content; bystanders among them.
        folders: set-up folders.
        solution: shell commands that solve it.
        checks: shell conditions that all hold when it is solved.
        touched: set-up files that the task itself changes; the others must not change.
        extra_entries: how many entries more the working directory holds when solved.
    """

    label: str
    instruction: str
    files: dict[str, str]
    folders: tuple[str, ...]
    solution: str
    checks: tuple[str, ...]
    touched: tuple[str, ...]
    extra_entries: int


type Builder = Callable[[Draw], Draft]

_TASK_TOML = """\
schema_version = "1.4"

[metadata]
family = "{family}"
tier = 1

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
cpus = 0.125
memory_mb = 128
network_mode = "no-network"
"""

_TEST_SH = """\
#!/bin/sh
# Checks the outcome only; everything else in the working directory must be as it was.
PATH=/usr/bin:/bin
export PATH
cd /app || exit 1
ok=1
check() {{
  if ! eval "$1"; then
    echo "failed: $1"
    ok=0
  fi
}}
{checks}
echo "$ok" > /logs/verifier/reward.txt
"""


def _mkdir(draw: Draw) -> Draft:
    name = draw.pick(THINGS)
    return Draft(
        label=name,
        instruction=f"Create a directory named {name}.",
        files=draw.bystanders(),
        folders=(),
        solution=f"mkdir {name}",
        checks=(f"[ -d {name} ]", f"[ ! -L {name} ]"),
        touched=(),
        extra_entries=1,
    )


def _touch(draw: Draw) -> Draft:
    name = draw.file()
    return Draft(
        label=name,
        instruction=f"Create an empty file named {name}.",
        files=draw.bystanders(),
        folders=(),
        solution=f"touch {name}",
        checks=(f"[ -f {name} ]", f"[ ! -L {name} ]", f"[ ! -s {name} ]"),
        touched=(),
        extra_entries=1,
    )


def _rm(draw: Draw) -> Draft:
    name = draw.file()
    return Draft(
        label=name,
        instruction=f"Delete the file {name}.",
        files={name: draw.content(), **draw.bystanders()},
        folders=(),
        solution=f"rm {name}",
        checks=(f"[ ! -e {name} ]", f"[ ! -L {name} ]"),
        touched=(name,),
        extra_entries=-1,
    )


def _mv(draw: Draw) -> Draft:
    old, new = draw.file(), draw.file()
    content = draw.content()
    return Draft(
        label=f"{old} {new}",
        instruction=f"Rename the file {old} to {new}.",
        files={old: content, **draw.bystanders()},
        folders=(),
        solution=f"mv {old} {new}",
        checks=(f"[ ! -e {old} ]", *_holds(new, content)),
        touched=(old,),
        extra_entries=0,
    )


def _chmod(draw: Draw) -> Draft:
    name = draw.file(SCRIPT_SUFFIXES)
    content = f"#!/bin/sh\necho {draw.pick(THINGS)}\n"
    return Draft(
        label=name,
        instruction=f"Make the file {name} executable.",
        files={name: content, **draw.bystanders()},
        folders=(),
        solution=f"chmod +x {name}",
        checks=(*_holds(name, content), _mode_has_x(name)),
        touched=(name,),
        extra_entries=0,
    )


def _movein(draw: Draw) -> Draft:
    name, folder = draw.file(), draw.pick(FOLDERS)
    content = draw.content()
    return Draft(
        label=f"{name} {folder}",
        instruction=f"Move the file {name} into the directory {folder}.",
        files={name: content, **draw.bystanders()},
        folders=(folder,),
        solution=f"mv {name} {folder}/",
        checks=(f"[ ! -e {name} ]", *_holds(f"{folder}/{name}", content)),
        touched=(name,),
        extra_entries=-1,
    )


BUILDERS: dict[str, Builder] = {
    "mkdir": _mkdir,
    "touch": _touch,
    "rm": _rm,
    "mv": _mv,
    "chmod": _chmod,
    "movein": _movein,
}


def _holds(path: str, content: str) -> tuple[str, ...]:
    """Conditions: a regular file with exactly this content."""
    text = content.replace("\n", "\\n")
    return (
        f"[ -f {path} ]",
        f"[ ! -L {path} ]",
        f"printf '{text}' | cmp -s - {path}",
    )


def _mode_has_x(path: str) -> str:
    """Condition: its owner may execute it; asked of the mode, as root may anything."""
    return f"case $(stat -c %A {path}) in -??[xs]*) true ;; *) false ;; esac"


def draft_files(family: str, draft: Draft) -> Files:
    """The package of a draft."""
    files = {
        "task.toml": (_TASK_TOML.format(family=family), 0o644),
        "instruction.md": (draft.instruction + "\n", 0o644),
        "environment/Dockerfile": (_dockerfile(draft), 0o644),
        "solution/solve.sh": (f"#!/bin/sh\nset -e\ncd /app\n{draft.solution}\n", 0o755),
        "tests/test.sh": (_test_script(draft), 0o755),
    }
    for name, content in draft.files.items():
        files[f"environment/files/{name}"] = (content, 0o644)
    return {name: (content.encode(), mode) for name, (content, mode) in files.items()}


def _dockerfile(draft: Draft) -> str:
    lines = ["FROM debian:bookworm-slim", "WORKDIR /app"]
    if draft.files:
        lines.append("COPY files/ /app/")
    lines += [f"RUN mkdir /app/{folder}" for folder in draft.folders]
    return "\n".join(lines) + "\n"


def _test_script(draft: Draft) -> str:
    conditions = list(draft.checks)
    for name, content in draft.files.items():
        if name not in draft.touched:
            text = content.replace("\n", "\\n")
            conditions.append(f"printf '{text}' | cmp -s - {name}")
    entries = len(draft.files) + len(draft.folders) + draft.extra_entries
    conditions.append(f"[ $(ls -A | wc -l) -eq {entries} ]")
    lines = [f"check {_quoted(condition)}" for condition in conditions]
    return _TEST_SH.format(checks="\n".join(lines))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$") + '"'
