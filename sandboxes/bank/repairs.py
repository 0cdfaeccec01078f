"""Tier 3, a failing script to repair: it is judged by what it does with other inputs."""

from __future__ import annotations

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import Expectation, mode, program
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import CITIES, PEOPLE, THINGS

EXECUTABLE = 0o755


def _repair(draw: Draw) -> Task:
    """One of five broken programs."""
    return draw.variant((_totals, _sizes, _durations, _rotate, _intervals))(draw)


def _task(
    name: str,
    instruction: str,
    broken: str,
    fixed: str,
    samples: dict[str, str],
    *expect: Expectation,
) -> Task:
    """A script that is executable before and after; `samples` are the inputs one can see."""
    return Task(
        label=name,
        instruction=f"{instruction} It must stay one executable file (mode 755) that uses nothing "
        "beyond a plain Debian with bash and python3; it will be run on other inputs than those "
        "here. Leave the sample files as they are.",
        files={name: broken, **samples},
        setup=f"chmod {EXECUTABLE:o} {name}",
        solution=f"cat > {name} <<'END'\n{fixed}END\nchmod {EXECUTABLE:o} {name}",
        expect=(mode(name, EXECUTABLE), *expect),
        changes=(name,),
    )


_TOTALS = """\
#!/usr/bin/env python3
import csv
import sys

totals = {}
with open(sys.argv[1], newline="") as handle:
    for row in csv.reader(handle):
        if not row:
            continue
        key, value = row[KEY], row[VALUE]
        totals[key] = totals.get(key, "") + value
for key, total in sorted(totals.items(), key=lambda item: item[1]):
    print(key, total)
"""
_TOTALS_FIXED = """\
#!/usr/bin/env python3
import csv
import sys

totals = {}
with open(sys.argv[1], newline="") as handle:
    for row in csv.DictReader(handle):
        totals[row["city"]] = totals.get(row["city"], 0) + int(row["amount"])
for key, total in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
    print(key, total)
"""


def _totals(draw: Draw) -> Task:
    name, sample = f"{draw.pick(THINGS)}.py", draw.file(("csv",))
    columns = draw.shuffled(("city", "amount", "person"))

    def table(count: int) -> tuple[str, str]:
        cities = draw.picks(CITIES, 5)
        sums: dict[str, int] = {}
        lines = [",".join(columns)]
        for _ in range(count):
            row = {
                "city": draw.choice(cities),
                "amount": str(draw.number(1, 500)),
                "person": f'"{draw.choice(PEOPLE)}, {draw.choice(PEOPLE)}"',
            }
            sums[row["city"]] = sums.get(row["city"], 0) + int(row["amount"])
            lines.append(",".join(row[column] for column in columns))
        ranked = sorted(sums.items(), key=lambda item: (-item[1], item[0]))
        return "\n".join(lines) + "\n", "\n".join(f"{city} {total}" for city, total in ranked)

    shown, hidden, other = table(12), table(30), table(9)
    broken = _TOTALS.replace("KEY", str(columns.index("city")))
    broken = broken.replace("VALUE", str(columns.index("amount")))
    swapped = (
        ",".join(("amount", "person", "city")) + '\n7,"a, b",oslo\n7,"c, d",lima\n9,"e, f",rome\n'
    )
    return _task(
        name,
        f"{name} is meant to print the total amount per city of a CSV file with a header, for "
        f"example `./{name} {sample}`: one line `CITY TOTAL` per city, highest total first, equal "
        "totals by city name. The columns city and amount are found by the header, in whatever "
        "order they come. It prints nonsense. Repair it.",
        broken,
        _TOTALS_FIXED,
        {sample: shown[0]},
        program([f"./{name}", "x.csv"], uses=[name], given={"x.csv": hidden[0]}, prints=hidden[1]),
        program([f"./{name}", "y.csv"], uses=[name], given={"y.csv": other[0]}, prints=other[1]),
        program(
            [f"./{name}", "z.csv"],
            uses=[name],
            given={"z.csv": swapped},
            prints="rome 9\nlima 7\noslo 7",
        ),
    )


_SIZES = """\
#!/bin/bash
# Usage: NAME FOLDER
for f in $(ls $1)
do
  n=$(wc -l $1/$f)
  echo $n
done
"""
_SIZES_FIXED = """\
#!/bin/bash
export LC_ALL=C
shopt -s nullglob dotglob
for f in "$1"/*; do
  [ -f "$f" ] && printf '%s %s\\n' "$(wc -l < "$f")" "${f##*/}"
done
exit 0
"""


def _sizes(draw: Draw) -> Task:
    name, folder = f"{draw.pick(THINGS)}.sh", draw.pick(THINGS)

    def tree(root: str, stems: list[str]) -> tuple[dict[str, str], str]:
        counts = {stem: draw.number(0, 7) for stem in stems}
        files = {f"{root}/{stem}": draw.content() * count for stem, count in counts.items()}
        files[f"{root}/nested folder/{stems[0]}"] = "not counted\n"
        return files, "\n".join(f"{counts[stem]} {stem}" for stem in sorted(stems))

    words = draw.picks(THINGS, 8)
    shown, _ = tree(folder, [f"{words[0]}.txt", f"{words[1]} {words[2]}.txt"])
    stems = [f"{words[3]} {words[4]}.md", f" {words[5]}.txt", f".{words[6]}", f"*{words[7]}"]
    hidden, expected = tree("some where", stems)
    spaced = "some where"
    return _task(
        name,
        f"`./{name} FOLDER` should print one line `LINES NAME` for every regular file that lies "
        "directly in FOLDER (hidden ones too, subdirectories not): its number of lines, one "
        "space, its name without the folder. Sorted by name in byte order, exit code 0, and "
        "nothing at all for an empty folder. It goes wrong with spaces and other odd characters "
        f"in names, also in FOLDER's. Fix {name}; {folder} is there to try it on.",
        _SIZES.replace("NAME", name),
        _SIZES_FIXED,
        shown,
        program([f"./{name}", spaced], uses=[name], given=hidden, prints=expected),
        program(
            [f"./{name}", f"{spaced}/nested folder"],
            uses=[name],
            given=hidden,
            prints=f"1 {stems[0]}",
        ),
    )


_DURATIONS = """\
#!/usr/bin/env python3
import re
import sys

UNITS = {"s": 1, "m": 60, "h": 60 * 60, "d": 24 * 60}

for line in sys.stdin if len(sys.argv) < 2 else open(sys.argv[1]):
    match = re.match(r"(\\d+)([smhd])", line)
    print(int(match.group(1)) * UNITS[match.group(2)])
"""
_DURATIONS_FIXED = """\
#!/usr/bin/env python3
import re
import sys

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

for line in open(sys.argv[1]):
    text = line.strip()
    if re.fullmatch(r"(\\d+[smhd])+", text):
        print(sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\\d+)([smhd])", text)))
    else:
        print("WORD")
"""


def _durations(draw: Draw) -> Task:
    name, sample = f"{draw.pick(THINGS)}.py", draw.file(("txt",))
    word = draw.choice(("invalid", "error", "unknown", "bad"))
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}

    def lines(count: int) -> tuple[str, str]:
        given, wanted = list[str](), list[str]()
        for _ in range(count):
            parts = [(draw.number(0, 120), unit) for unit in units if draw.number(0, 1)]
            junk = draw.choice(("", "", "", "x", " 5", "1", "h"))
            given.append("".join(f"{n}{unit}" for n, unit in parts) + junk)
            total = str(sum(n * units[unit] for n, unit in parts))
            wanted.append(total if parts and not junk else word)
        return "\n".join(given) + "\n", "\n".join(wanted)

    shown, hidden = lines(6), lines(40)
    return _task(
        name,
        f"`./{name} FILE` converts durations to seconds, one per line: 90s is 90, 2h is 7200, and "
        "several parts add up, so 1d2h30m is 95400 (d is a day of 24 hours). For a line that is "
        f"not made of such parts only (also an empty one) it must print {word} and go on. At "
        f"present it gets most lines wrong or crashes. Repair it; {sample} has some examples to "
        "try.",
        _DURATIONS,
        _DURATIONS_FIXED.replace("WORD", word),
        {sample: shown[0]},
        program([f"./{name}", "a"], uses=[name], given={"a": hidden[0]}, prints=hidden[1]),
        program(
            [f"./{name}", "b"],
            uses=[name],
            given={"b": "1d2h30m\n\n90s\n2 h\n10\n5m5m\n"},
            prints=f"95400\n{word}\n90\n{word}\n{word}\n600",
        ),
    )


_ROTATE = """\
#!/bin/sh
# Usage: NAME FILE
for i in 1 2 3; do
  n=$((i + 1))
  if [ -e $1.$i ]; then mv $1.$i $1.$n; fi
done
mv $1 $1.1
"""
_ROTATE_FIXED = """\
#!/bin/sh
set -eu
if [ ! -f "$1" ]; then
  echo "no such file" >&2
  exit 2
fi
i=KEEP
rm -f -- "$1.$i"
while [ "$i" -gt 1 ]; do
  if [ -e "$1.$((i - 1))" ]; then mv -- "$1.$((i - 1))" "$1.$i"; fi
  i=$((i - 1))
done
mv -- "$1" "$1.1"
: > "$1"
"""


def _rotate(draw: Draw) -> Task:
    name, sample = f"{draw.pick(THINGS)}.sh", draw.file(("log",))
    keep = draw.number(3, 5)
    other = "my service.log"
    old = {f"{other}.{at}": f"{draw.pick(THINGS)} {at}\n" for at in range(1, keep + 1)}
    given = {other: f"now {draw.pick(THINGS)}\n", **old}
    rotated: dict[str, str | None] = {other: "", f"{other}.1": given[other]}
    rotated |= {f"{other}.{at + 1}": old[f"{other}.{at}"] for at in range(1, keep)}
    rotated[f"{other}.{keep + 1}"] = None
    gap = {other: "a\n", f"{other}.2": "b\n"}
    gapped: dict[str, str | None] = {
        other: "",
        f"{other}.1": "a\n",
        f"{other}.2": None,
        f"{other}.3": "b\n",
    }
    return _task(
        name,
        f"`./{name} FILE` is a log rotation that loses logs. It should keep {keep} old parts: "
        f"FILE.{keep} is deleted if it is there, every FILE.N becomes FILE.N+1 (gaps stay gaps, "
        "one further), FILE becomes FILE.1, and a new empty FILE is made. Names may contain "
        "spaces. If FILE is no regular file, it must change nothing and exit with code 2; "
        f"otherwise the exit code is 0. Correct the script. {sample} and its parts are there to "
        "look at; work on a copy.",
        _ROTATE.replace("NAME", name),
        _ROTATE_FIXED.replace("KEEP", str(keep)),
        {sample: "today\n", f"{sample}.1": "yesterday\n", f"{sample}.2": "the day before\n"},
        program([f"./{name}", other], uses=[name], given=given, leaves=rotated),
        program([f"./{name}", other], uses=[name], given=gap, leaves=gapped),
        program(
            [f"./{name}", "absent"],
            uses=[name],
            given={"absent.1": "x\n"},
            exits=2,
            leaves={"absent": None, "absent.1": "x\n", "absent.2": None},
        ),
    )


_INTERVALS = """\
#!/usr/bin/env python3
import sys

spans = [tuple(line.split()) for line in open(sys.argv[1])]
merged = []
for start, end in sorted(spans):
    if merged and start < merged[-1][1]:
        merged[-1] = (merged[-1][0], end)
    else:
        merged.append((start, end))
for start, end in merged:
    print(start, end)
"""
_INTERVALS_FIXED = """\
#!/usr/bin/env python3
import sys

spans = [sorted(map(int, line.split())) for line in open(sys.argv[1]) if line.strip()]
merged = []
for start, end in sorted(spans):
    if merged and start <= merged[-1][1]:
        merged[-1][1] = max(merged[-1][1], end)
    else:
        merged.append([start, end])
for start, end in merged:
    print(start, end)
print("total", sum(end - start for start, end in merged))
"""


def _intervals(draw: Draw) -> Task:
    name, sample = f"{draw.pick(THINGS)}.py", draw.file(("txt",))

    def spans(count: int) -> tuple[str, str]:
        pairs = [
            (start, start + draw.number(1, 90))
            for start in (draw.number(0, 1500) for _ in range(count))
        ]
        merged: list[list[int]] = []
        for start, end in sorted(pairs):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        lines = [f"{start} {end}" for start, end in merged]
        lines.append(f"total {sum(end - start for start, end in merged)}")
        given = [f"{b} {a}" if draw.number(0, 4) == 0 else f"{a} {b}" for a, b in pairs]
        return "\n".join(given) + "\n", "\n".join(lines)

    shown, hidden = spans(8), spans(40)
    return _task(
        name,
        f"`./{name} FILE` should merge overlapping intervals. FILE has one interval per line: two "
        "integers, in either order; blank lines are skipped. Intervals that overlap or touch (5 "
        "10 and 10 12) become one. It prints the merged ones as `START END` by ascending start, "
        "and then a line `total N`, the length they cover together. There are several bugs in "
        f"it, and the last line is missing altogether. Make it work; try it on {sample}.",
        _INTERVALS,
        _INTERVALS_FIXED,
        {sample: shown[0]},
        program([f"./{name}", "in"], uses=[name], given={"in": hidden[0]}, prints=hidden[1]),
        program(
            [f"./{name}", "in"],
            uses=[name],
            given={"in": "100 9\n\n5 9\n200 210\n20 30\n210 212\n"},
            prints="5 100\n200 212\ntotal 107",
        ),
    )


BUILDERS: dict[str, Builder] = {"repair": _repair}
