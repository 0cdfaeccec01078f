"""Tier 2, pipelines over lines: counting, selecting, comparing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import text
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import CITIES, KEEP, PEOPLE, THINGS


def _tally(draw: Draw) -> Task:
    """Rank the values of one column of an access log."""
    source, out = draw.file(("log",)), draw.file(("txt",))
    hosts = [f"10.0.{draw.number(0, 9)}.{draw.number(1, 250)}" for _ in range(7)]
    paths = [f"/{word}/{draw.number(1, 40)}" for word in draw.picks(THINGS, 7)]
    lines = [
        f"2024-05-{draw.number(1, 28):02d}T{draw.number(0, 23):02d}:{draw.number(0, 59):02d} "
        f"{hosts[min(draw.number(0, 6), draw.number(0, 6))]} "
        f"{draw.choice(('GET', 'GET', 'POST', 'PUT'))} "
        f"{paths[min(draw.number(0, 6), draw.number(0, 6))]} "
        f"{draw.choice((200, 200, 200, 304, 404, 500))}"
        for _ in range(draw.number(70, 130))
    ]
    column, what = draw.variant(((1, "client address"), (3, "path"), (3, "path"), (1, "client")))
    method = draw.variant(("", "GET", "POST"))
    top = draw.number(3, 5)
    chosen = [line.split() for line in lines if not method or line.split()[2] == method]
    counts = Counter(fields[column] for fields in chosen)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:top]
    only = f" counting {method} requests only" if method else ""
    ask = draw.variant(
        (
            f"{source} is a web server's access log: time, client, method, path and status, "
            f"separated by single spaces. Find the {top} most frequent values of the {what} "
            f"column,{only or ' over all requests'}, and write them to {out}, one per line, as "
            "the count, one space and the value. Most frequent first; where counts are equal, "
            "in byte order of the value.",
            f"Who or what shows up most in {source}? Each line there reads `time client method "
            f"path status`. Write the top {top} by {what},{only or ' all methods together'}, "
            f"into {out}. Format of a line: COUNT VALUE, with one space between. Sort by count, "
            "highest first, and break ties by the value in ascending (C locale) order.",
        )
    )
    test = f'$3 == "{method}" ' if method else ""
    return Task(
        label=f"{source}",
        instruction=f"{ask} {draw.choice(KEEP)}",
        files={source: "\n".join(lines) + "\n", **draw.bystanders()},
        solution=f"""
export LC_ALL=C
awk '{test}{{ print ${column + 1} }}' {source} | sort | uniq -c | sort -k1,1nr -k2,2 |
  awk 'NR <= {top} {{ print $1, $2 }}' > {out}
""",
        expect=(text(out, "\n".join(f"{count} {value}" for value, count in ranked)),),
    )


type _Invoice = tuple[int, str, str, int, str]


def _select(draw: Draw) -> Task:
    """Filter a plain CSV by two conditions, print some columns, sorted."""
    source, out = draw.file(("csv",)), draw.file(("txt",))
    cities = draw.picks(CITIES, 5)
    states = ("open", "paid", "void")
    table: list[_Invoice] = [
        (
            100 + at,
            draw.choice(PEOPLE),
            draw.choice(cities),
            draw.number(5, 900),
            draw.choice(states),
        )
        for at in draw.shuffled(range(draw.number(40, 70)))
    ]
    low, state, city = draw.number(150, 450), draw.choice(states), cities[0]
    choices: tuple[tuple[str, str, Callable[[_Invoice], bool]], ...] = (
        (
            f"whose status is {state} and whose amount is at least {low}",
            f'$5 == "{state}" && $4 >= {low}',
            lambda row: row[4] == state and row[3] >= low,
        ),
        (
            f"that are not from {city} and whose amount is below {low}",
            f'$3 != "{city}" && $4 < {low}',
            lambda row: row[2] != city and row[3] < low,
        ),
        (
            f"from {city} or {cities[1]} whose status is not {state}",
            f'($3 == "{city}" || $3 == "{cities[1]}") && $5 != "{state}"',
            lambda row: row[2] in (city, cities[1]) and row[4] != state,
        ),
    )
    condition, test, matches = draw.variant(choices)
    rows = sorted(row for row in table if matches(row))
    ask = draw.variant(
        (
            f"From the invoices in {source}, take those {condition}. Write their id, customer "
            f"and amount to {out}, separated by single spaces, one invoice per line, ordered by "
            "id from low to high, without a header line.",
            f"I need a list of the records in {source} {condition}. For each of them put one "
            f"line `ID CUSTOMER AMOUNT` (single spaces) into {out}. No header, smallest id first.",
        )
    )
    data = "id,customer,city,amount,status\n"
    data += "".join(",".join(map(str, row)) + "\n" for row in table)
    return Task(
        label=source,
        instruction=f"{ask} {draw.choice(KEEP)}",
        files={source: data, **draw.bystanders()},
        solution=f"""
awk -F, 'NR > 1 && {test} {{ print $1, $2, $4 }}' {source} | sort -n > {out}
""",
        expect=(text(out, "\n".join(f"{row[0]} {row[1]} {row[3]}" for row in rows)),),
    )


def _compare(draw: Draw) -> Task:
    """Set operations on two unsorted lists with repeats, and a join by key."""
    first, second, out = draw.file(("txt",)), draw.file(("txt",)), draw.file(("out",))
    people = draw.picks(PEOPLE, 22)
    left, right = people[:15], people[8:]
    if draw.index % 4 == 3:
        return _join(draw, first, second, out, left, right)
    lists = [
        draw.shuffled([*names, *(draw.choice(names) for _ in range(5))]) for names in (left, right)
    ]
    ask, command, result = draw.variant(
        (
            (
                f"{first} and {second} list people, one per line, in no order and some of them "
                f"repeatedly. Write to {out} everybody who is in both files",
                "-12",
                set(left) & set(right),
            ),
            (
                f"Some people signed up in {first}; those who came are in {second} (one name per "
                f"line, with repeats). Write to {out} who signed up but did not come",
                "-23",
                set(left) - set(right),
            ),
            (
                f"Compare the two name lists {first} and {second} (one name per line, unsorted, "
                f"with repeats). Put into {out} the names that occur in exactly one of the files",
                "-3",
                set(left) ^ set(right),
            ),
        )
    )
    return Task(
        label=f"{first} {second}",
        instruction=f"{ask}, each once, one per line, in alphabetical order. {draw.choice(KEEP)}",
        files={
            name: "\n".join(names) + "\n"
            for name, names in zip((first, second), lists, strict=True)
        },
        solution=f"""
export LC_ALL=C
comm {command} <(sort -u {first}) <(sort -u {second}) | tr -d '\\t' | sort > {out}
""",
        expect=(text(out, "\n".join(sorted(result))),),
    )


def _join(draw: Draw, first: str, second: str, out: str, left: list[str], right: list[str]) -> Task:
    cities = {name: draw.choice(CITIES) for name in draw.shuffled(left)}
    desks = {name: draw.number(100, 999) for name in draw.shuffled(right)}
    joined = [f"{name} {cities[name]} {desks.get(name, '-')}" for name in sorted(cities)]
    return Task(
        label=f"{first} {second}",
        instruction=f"{first} holds lines `NAME CITY` and {second} holds lines `NAME DESK`, both "
        f"unsorted, each name at most once per file. Write {out} with one line `NAME CITY DESK` "
        f"for everybody in {first}, single spaces between, sorted by name; where {second} has no "
        f"desk for somebody, put a hyphen. {draw.choice(KEEP)}",
        files={
            first: "".join(f"{name} {city}\n" for name, city in cities.items()),
            second: "".join(f"{name} {desk}\n" for name, desk in desks.items()),
        },
        solution=f"""
export LC_ALL=C
join -a 1 -e - -o 0,1.2,2.2 <(sort {first}) <(sort {second}) > {out}
""",
        expect=(text(out, "\n".join(joined)),),
    )


BUILDERS: dict[str, Builder] = {"tally": _tally, "select": _select, "compare": _compare}
