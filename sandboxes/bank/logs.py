"""Tier 3, log analysis: questions to a rotated log."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import Expectation, json_value, rows, text, unchanged
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import KEEP, PEOPLE, THINGS

MINUTE_S = 60


def _clock(second: int) -> str:
    """Seconds since midnight as a log writes them."""
    return f"2024-03-09T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"


def _rotated(draw: Draw, lines: list[str]) -> tuple[dict[str, str], str, str, str]:
    """A log in three rotated parts, the oldest gzipped: files, set-up, name, where it lies."""
    name = draw.pick(THINGS)
    where = f"logs/{name}.log"
    first, second = len(lines) // 3, 2 * len(lines) // 3
    files = {
        f"{where}.2": "".join(line + "\n" for line in lines[:first]),
        f"{where}.1": "".join(line + "\n" for line in lines[first:second]),
        where: "".join(line + "\n" for line in lines[second:]),
    }
    intro = (
        f"The log of the service {name} is in logs/: {name}.log.2.gz is the oldest part, then "
        f"{name}.log.1, then {name}.log."
    )
    return files, f"gzip -n {where}.2", where, intro


def _logs(draw: Draw) -> Task:
    """One of five questions to a rotated log."""
    return draw.variant((_errors, _slowest, _intruders, _unfinished, _peak))(draw)


def _task(
    draw: Draw, kind: str, lines: list[str], ask: str, solution: str, *expect: Expectation
) -> Task:
    files, setup, where, intro = _rotated(draw, lines)
    oldest = f"{where}.2"
    reading = f"{{ gunzip -c {where}.2.gz; cat {where}.1 {where}; }}"
    return Task(
        label=f"{kind} {where.removeprefix('logs/')}",
        instruction=f"{intro} {ask} {draw.choice(KEEP)}",
        files=files,
        setup=setup,
        solution=solution.replace("READ", reading),
        expect=(
            *expect,
            unchanged(f"{oldest}.gz", files[oldest], gzipped=True),
        ),
        changes=(oldest,),
    )


def _errors(draw: Draw) -> Task:
    parts = draw.picks(THINGS, 5)
    levels = ("INFO", "INFO", "INFO", "WARN", "ERROR")
    at, lines = 0, list[str]()
    total, bad = Counter[str](), Counter[str]()
    for _ in range(draw.number(120, 160)):
        at += draw.number(1, 400)
        part, level = draw.choice(parts), draw.choice(levels)
        lines.append(f"{_clock(at)} {level} [{part}] {draw.choice(THINGS)} ERROR-free check")
        total[part] += 1
        bad[part] += level == "ERROR"
    out = draw.file(("csv",))
    ranked = sorted(parts, key=lambda part: (-bad[part], part))
    table = [["component", "lines", "errors"]]
    table += [[part, str(total[part]), str(bad[part])] for part in ranked if total[part]]
    return _task(
        draw,
        "errors",
        lines,
        "A line reads `TIME LEVEL [COMPONENT] MESSAGE`. Write a CSV file "
        f"{out} with the header component,lines,errors and one row per component: how many lines "
        "it logged in all three parts together, and how many of them at level ERROR (a message "
        "may contain that word too; that doesn't count). Most errors first, equal ones by name.",
        f"""
READ | awk '{{ gsub(/[][]/, "", $3); n[$3]++; if ($2 == "ERROR") e[$3]++ }}
  END {{ for (c in n) print c "," n[c] "," e[c] + 0 }}' | LC_ALL=C sort -t, -k3,3nr -k1,1 |
  sed '1i component,lines,errors' > {out}
""",
        rows(out, table),
    )


def _slowest(draw: Draw) -> Task:
    paths = [f"/{word}" for word in draw.picks(THINGS, 6)]
    at, lines = 0, list[str]()
    times: dict[str, list[int]] = defaultdict(list)
    for _ in range(draw.number(110, 150)):
        at += draw.number(1, 400)
        path = paths[min(draw.number(0, 5), draw.number(0, 5))]
        took, status = draw.number(3, 900), draw.choice((200, 200, 200, 404, 500))
        query = draw.choice(("", "", f"?page={draw.number(1, 9)}"))
        lines.append(f"{_clock(at)} GET {path}{query} {status} {took}ms")
        if status == 200:
            times[path].append(took)
    least, out = draw.number(5, 8), draw.file(("json",))
    result = {
        path: {"count": len(took), "median": statistics.median_low(took), "max": max(took)}
        for path, took in times.items()
        if len(took) >= least
    }
    return _task(
        draw,
        "latency",
        lines,
        "A line reads `TIME METHOD PATH STATUS DURATIONms`. Look at the requests with status 200 "
        "only, and drop the query string (from the ? on) from their paths. Write to "
        f"{out} a JSON object with one key per path that has at least {least} such requests; the "
        'value is {"count": how many, "median": their median duration, "max": the longest}, '
        "durations as integers in milliseconds. With an even count, the median is the lower of "
        "the two middle values.",
        f"""
READ | python3 -c '
import collections, json, sys
times = collections.defaultdict(list)
for line in sys.stdin:
    _, _, path, status, took = line.split()
    if status == "200":
        times[path.partition("?")[0]].append(int(took.removesuffix("ms")))
print(json.dumps({{path: dict(count=len(took), median=sorted(took)[(len(took) - 1) // 2],
    max=max(took)) for path, took in times.items() if len(took) >= {least}}}))
' > {out}
""",
        json_value(out, result),
    )


def _intruders(draw: Draw) -> Task:
    hosts = [f"203.0.113.{at}" for at in draw.shuffled(range(1, 200))[:9]]
    streak: Counter[str] = Counter()
    found: set[str] = set()
    limit = draw.number(3, 4)
    at, lines = 0, list[str]()
    for step in range(draw.number(130, 160)):
        at += draw.number(1, 300)
        host = draw.choice(hosts)
        # Every host is stubborn or not, so that the answer is neither nobody nor everybody.
        lucky = draw.number(0, 9) < (2 if hosts.index(host) % 2 else 6)
        lines.append(
            f"{_clock(at)} sshd[{1000 + step}]: {'Accepted' if lucky else 'Failed'} password for "
            f"{draw.choice(PEOPLE)} from {host} port {draw.number(20000, 60000)}"
        )
        if lucky and streak[host] >= limit:
            found.add(host)
        streak[host] = 0 if lucky else streak[host] + 1
    out = draw.file(("txt",))
    return _task(
        draw,
        "logins",
        lines,
        "Find the addresses that may have guessed a password: those that had a login accepted "
        f"right after at least {limit} failed ones in a row. Count per address, over all three "
        "parts in order of time and whatever the user name; an accepted login ends the row. "
        f"Write the addresses to {out}, one per line, each once, in byte order.",
        f"""
READ | awk '{{ for (i = 1; i < NF; i++) if ($i == "from") a = $(i + 1) }}
  $3 == "Failed" {{ n[a]++ }}
  $3 == "Accepted" {{ if (n[a] >= {limit}) print a; n[a] = 0 }}' | LC_ALL=C sort -u > {out}
""",
        text(out, "\n".join(sorted(found))),
    )


def _unfinished(draw: Draw) -> Task:
    jobs = draw.shuffled(range(100, 999))[:24]
    open_jobs = set(jobs[::6])
    events: list[tuple[int, str]] = []
    spans: dict[int, int] = {}
    for job in jobs:
        start = draw.number(100, 60_000)
        events.append((start, f"job {job} started"))
        if job not in open_jobs:
            spans[job] = draw.number(5, 9000)
            word = draw.choice(("finished", "finished", "failed"))
            events.append((start + spans[job], f"job {job} {word}"))
    lines = [f"{_clock(at)} {message}" for at, message in sorted(events)]
    longest = sorted(spans, key=lambda job: (-spans[job], job))[:5]
    out, rest = draw.file(("csv",)), draw.file(("txt",))
    return _task(
        draw,
        "jobs",
        lines,
        "Every job logs `job ID started` and, unless it is lost, later `job ID finished` or `job "
        f"ID failed`. Write the ids of the jobs that never ended to {rest}, one per line in "
        f"ascending order. Write the five jobs that ran longest (however they ended) to {out}, a "
        "CSV file with the header job,seconds, longest first, equal ones by id.",
        f"""
READ | python3 -c '
import csv, datetime, sys
began, spans = {{}}, {{}}
for line in sys.stdin:
    at, _, job, what = line.split()
    at = datetime.datetime.fromisoformat(at.replace("Z", "+00:00"))
    if what == "started":
        began[int(job)] = at
    else:
        spans[int(job)] = int((at - began[int(job)]).total_seconds())
print(*sorted(set(began) - set(spans)), sep="\\n", file=open("{rest}", "w"))
table = csv.writer(open("{out}", "w"))
table.writerow(["job", "seconds"])
table.writerows(sorted(spans.items(), key=lambda item: (-item[1], item[0]))[:5])
'
""",
        text(rest, "\n".join(map(str, sorted(open_jobs)))),
        rows(out, [["job", "seconds"], *([str(job), str(spans[job])] for job in longest)]),
    )


def _peak(draw: Draw) -> Task:
    at, lines = draw.number(0, 3000), list[str]()
    minutes: Counter[str] = Counter()
    for _ in range(draw.number(200, 260)):
        at += draw.choice((0, 1, 2, 5, 9, 20, 45))
        lines.append(f"{_clock(at)} accept {draw.choice(PEOPLE)} {draw.number(1, 99)}")
        minutes[_clock(at)[11:16]] += 1
    top = draw.number(3, 5)
    begun, last = lines[0][11:16], lines[-1][11:16]
    span = [
        f"{second // 3600:02d}:{second // 60 % 60:02d}"
        for second in range(_seconds(begun), _seconds(last) + 1, MINUTE_S)
    ]
    quiet = sum(minute not in minutes for minute in span)
    ranked = sorted(minutes, key=lambda minute: (-minutes[minute], minute))[:top]
    out = draw.file(("txt",))
    return _task(
        draw,
        "peak",
        lines,
        f"Write {top + 1} lines to {out}. The first {top}: the minutes with the most lines, as "
        "`HH:MM COUNT`, busiest first and equal ones by time. The last: `quiet N`, where N is the "
        "number of minutes without any line between the minute of the first line of the log and "
        "that of the last.",
        f"""
READ | python3 -c '
import collections, sys
stamps = [line[11:16] for line in sys.stdin]
count = collections.Counter(stamps)
for minute in sorted(count, key=lambda item: (-count[item], item))[:{top}]:
    print(minute, count[minute])
first, last = (int(stamp[:2]) * 60 + int(stamp[3:]) for stamp in (stamps[0], stamps[-1]))
print("quiet", last - first + 1 - len(count))
' > {out}
""",
        text(out, "\n".join([*(f"{item} {minutes[item]}" for item in ranked), f"quiet {quiet}"])),
    )


def _seconds(minute: str) -> int:
    return int(minute[:2]) * 3600 + int(minute[3:]) * 60


BUILDERS: dict[str, Builder] = {"logs": _logs}
