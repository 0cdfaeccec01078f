"""Tier 3, processes and signals: scripts that start, bound, stop and lock others."""

from __future__ import annotations

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import Expectation, mode, program
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import THINGS

EXECUTABLE = 0o755
PARALLEL_S = 5.0  # jobs that wait for each other hang for ever when run one by one
HANG_S = 60  # what must be ended sleeps so long, far beyond a program's own limit


def _process(draw: Draw) -> Task:
    """One of five jobs about processes."""
    return draw.variant((_stop, _parallel, _limit, _reload, _lock))(draw)


def _task(
    name: str,
    instruction: str,
    fixed: str,
    *expect: Expectation,
    draft: str = "",
    samples: dict[str, str] | None = None,
) -> Task:
    """A script to write, or to finish when there is a draft of it."""
    return Task(
        label=name,
        instruction=f"{instruction} The script must be executable (mode 755), and may be written "
        "in sh, bash or Python 3. It is tested by running it in another directory.",
        files={**({name: draft} if draft else {}), **(samples or {})},
        solution=f"cat > {name} <<'END'\n{fixed}END\nchmod {EXECUTABLE:o} {name}",
        expect=(mode(name, EXECUTABLE), *expect),
        changes=(name,) if draft else (),
    )


def _stop(draw: Draw) -> Task:
    name, base = f"{draw.pick(THINGS)}.sh", draw.pick(THINGS)
    ready, bye = draw.picks(THINGS, 2)
    draft = f"""#!/bin/bash
echo $$ > {base}.pid
echo {ready}
while true; do
  sleep {HANG_S}
done
"""
    fixed = f"""#!/bin/bash
stop() {{
  rm -f {base}.pid
  echo "$1" > {base}.state
  echo {bye}
  kill "$!" 2> /dev/null
  exit "$2"
}}
trap 'stop terminated 0' TERM
trap 'stop interrupted 3' INT
echo $$ > {base}.pid
echo {ready}
while true; do
  sleep {HANG_S} &
  wait "$!"
done
"""
    return _task(
        name,
        f"{name} is a service that writes its process id to {base}.pid in the current directory, "
        f"prints {ready}, and then works for ever. Make it stop properly. On SIGTERM it must "
        f"remove {base}.pid, write the line `terminated` to {base}.state, print {bye} and exit "
        "with code 0; on SIGINT the same, but with the line `interrupted` and exit code 3. It "
        "must react within two seconds, whatever it is doing.",
        fixed,
        *(
            program(
                [f"./{name}"],
                uses=[name],
                prints=f"{ready}\n{bye}",
                exits=code,
                signals=[(ready, signal)],
                leaves={f"{base}.pid": None, f"{base}.state": word},
                within_s=8.0,
            )
            for signal, word, code in (("SIGTERM", "terminated", 0), ("SIGINT", "interrupted", 3))
        ),
        draft=draft,
    )


def _parallel(draw: Draw) -> Task:
    name, folder, out = f"{draw.pick(THINGS)}.sh", draw.pick(THINGS), draw.pick(THINGS)
    jobs = draw.picks(THINGS, 6)
    failing = sorted(jobs[:2])
    # Each waits for the file of another, so they end only when all run at once.
    given = {
        f"{folder}/{job}.sh": f"touch started-{job}\n"
        f"while [ ! -e started-{jobs[(at + 1) % 6]} ]; do sleep 0.05; done\n"
        f"exit {at + 3 if job in failing else 0}\n"
        for at, job in enumerate(jobs)
    }
    fixed = f"""#!/bin/bash
export LC_ALL=C
shopt -s nullglob
declare -A pids
for job in {folder}/*.sh; do
  sh "$job" &
  pids[$job]=$!
done
: > {out}.txt
failed=0
for job in {folder}/*.sh; do
  if wait "${{pids[$job]}}"; then continue; fi
  failed=$((failed + 1))
  basename "$job" .sh >> {out}.txt
done
exit "$failed"
"""
    draft = f"""#!/bin/bash
for job in {folder}/*.sh; do
  sh "$job"
done
"""
    return _task(
        name,
        f"{name} runs the jobs {folder}/*.sh one after the other and forgets whether they worked. "
        "Rewrite it so that it starts all of them at once (with sh, from the current directory), "
        f"waits for every one, writes the names of those that exited with another code than 0 "
        f"to {out}.txt (without .sh, one per line, in byte order; an empty file if there are "
        "none), and itself exits with the number of failed jobs.",
        fixed,
        program(
            [f"./{name}"],
            uses=[name],
            given=given,
            exits=len(failing),
            leaves={f"{out}.txt": "\n".join(failing)},
            within_s=PARALLEL_S,
        ),
        program(
            [f"./{name}"],
            uses=[name],
            given={f"{folder}/{jobs[0]}.sh": "sleep 0.1\n"},
            leaves={f"{out}.txt": ""},
        ),
        draft=draft,
        samples={f"{folder}/{job}.sh": f"echo {job}\n" for job in jobs[:3]},
    )


def _limit(draw: Draw) -> Task:
    name, log = f"{draw.pick(THINGS)}.sh", f"{draw.pick(THINGS)}.txt"
    code = draw.number(50, 99)
    fixed = f"""#!/usr/bin/env python3
import os
import signal
import subprocess
import sys

child = subprocess.Popen(sys.argv[2:], start_new_session=True)
try:
    code = child.wait(float(sys.argv[1]))
except subprocess.TimeoutExpired:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    with open("{log}", "a") as handle:
        print("killed", " ".join(sys.argv[2:]), file=handle)
    code = {code}
sys.exit(code if code >= 0 else 128 - code)
"""
    tail = "sleep 2; touch late"
    return _task(
        name,
        f"Write {name}, used as `./{name} SECONDS COMMAND [ARGUMENT...]`. It runs the command and "
        "exits with the command's exit code. If the command is still running after SECONDS (which "
        "may be a fraction), it kills the command and the processes the command started in the "
        "background, appends the line `killed COMMAND ARGUMENT...` (words joined by single "
        f"spaces) to {log} in the current directory, and exits with code {code}. Arguments with "
        "spaces must reach the command unharmed, and its output goes to standard output.",
        fixed,
        program(
            [f"./{name}", "5", "printf", "%s|", "a b", "c"],
            uses=[name],
            prints="a b|c|",
            leaves={log: None},
        ),
        program([f"./{name}", "5", "sh", "-c", "exit 7"], uses=[name], exits=7),
        program(
            [
                "sh",
                "-c",
                f"./{name} 0.5 sh tree; code=$?; sleep 2; exit $code",
            ],
            uses=[name],
            given={"tree": f"sh -c '{tail}' &\necho begun\nsleep {HANG_S}\n"},
            prints="begun",
            exits=code,
            leaves={log: "killed sh tree", "late": None},
        ),
    )


def _reload(draw: Draw) -> Task:
    name, config, key = f"{draw.pick(THINGS)}.py", f"{draw.pick(THINGS)}.cfg", draw.pick(THINGS)
    first, missing = draw.number(100, 499), draw.choice(("none", "unset", "absent"))
    draft = f"""#!/usr/bin/env python3
import time

settings = dict(line.strip().split("=") for line in open("{config}"))
print("{key}", settings["{key}"])
time.sleep({HANG_S})
"""
    fixed = f"""#!/usr/bin/env python3
import signal
import sys


def show(*_):
    value = "{missing}"
    with open("{config}") as handle:
        for line in handle:
            name, equals, text = line.partition("=")
            if equals and name.strip() == "{key}":
                value = text.strip()
    print("{key}", value, flush=True)


def stop(*_):
    print("stopped", flush=True)
    sys.exit(0)


waited = {{signal.SIGHUP: show, signal.SIGTERM: stop}}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
show()
print("ready", flush=True)
while True:
    waited[signal.sigwait(waited)]()
"""
    # Whoever starts it changes the file between the two signals.
    driver = f"""
import signal, subprocess, sys
service = subprocess.Popen(["./{name}"], stdout=subprocess.PIPE, text=True)
def line():
    print(service.stdout.readline().strip(), flush=True)
line(); line()
for text in ("other = 1\\n{key} = {first + 1}\\n", "{key}x = 1\\n"):
    open("{config}", "w").write(text)
    service.send_signal(signal.SIGHUP)
    line()
service.send_signal(signal.SIGTERM)
line()
sys.exit(service.wait())
"""
    expected = [
        f"{key} {first}",
        "ready",
        f"{key} {first + 1}",
        f"{key} {missing}",
        "stopped",
    ]
    return _task(
        name,
        f"Finish the service {name}. At start it reads {config} in the current directory (lines "
        f"`name = value`, blanks around both don't count, the last line of a name wins), prints "
        f"`{key} VALUE`, or `{key} {missing}` if there is no such setting, and then the line "
        "`ready`. On every SIGHUP it reads the file again and prints that line (not ready) again, "
        "and on SIGTERM it prints `stopped` and exits with code 0. Its output must appear at "
        "once, also when it goes to a pipe. Other signals and lines don't matter.",
        fixed,
        program(
            ["python3", "driver.py"],
            uses=[name],
            given={"driver.py": driver, config: f"# {key} = 1\n{key} = {first}\n"},
            prints="\n".join(expected),
            within_s=10.0,
        ),
        draft=draft,
        samples={config: f"{key} = {draw.number(1, 99)}\n"},
    )


def _lock(draw: Draw) -> Task:
    name, lock = f"{draw.pick(THINGS)}.sh", f"{draw.pick(THINGS)}.lock"
    busy = draw.number(60, 99)
    fixed = f"""#!/bin/bash
if ! (set -o noclobber; echo $$ > {lock}) 2> /dev/null; then
  owner=$(cat {lock})
  if [ -n "$owner" ] && kill -0 "$owner" 2> /dev/null; then
    echo "busy $owner"
    exit {busy}
  fi
  echo $$ > {lock}
fi
trap 'rm -f {lock}' EXIT
"$@"
exit $?
"""
    both = f"""
./{name} sh -c 'touch inside; while [ ! -e go ]; do sleep 0.05; done; echo first' &
while [ ! -e inside ]; do sleep 0.05; done
owner=$(cat {lock})
./{name} echo second > second.txt
echo $?
[ "$(cat second.txt)" = "busy $owner" ] && echo told
touch go
wait
./{name} sh -c 'cat {lock} > mine; exit 4'
echo $?
[ -s mine ] && [ "$(cat mine)" -gt 1 ] && echo held
"""
    return _task(
        name,
        f"Write {name}, used as `./{name} COMMAND [ARGUMENT...]`, which runs the command only if "
        f"no other {name} is running one in the current directory. While the command runs, "
        f"{lock} in the current directory holds the process id of the {name} that started it; "
        f"afterwards {lock} is gone, and the exit code is the command's. If another one is "
        f"running, it prints `busy PID` with that one's process id and exits with code {busy} "
        f"without running the command. A {lock} whose process no longer exists is stale: it is "
        "taken over.",
        fixed,
        program(
            ["bash", "both.sh"],
            uses=[name],
            given={"both.sh": both},
            prints=f"{busy}\ntold\nfirst\n4\nheld",
            leaves={lock: None},
        ),
        program(
            [f"./{name}", "echo", "two words"],
            uses=[name],
            given={lock: "999999\n"},
            prints="two words",
            leaves={lock: None},
        ),
    )


BUILDERS: dict[str, Builder] = {"process": _process}
