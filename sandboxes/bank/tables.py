"""Tier 3, CSV and JSON: summaries, conversions, changes, and files made from a table."""

from __future__ import annotations

import json

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import json_value, names, rows, text
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import CITIES, KEEP, PEOPLE, THINGS


def _tables(draw: Draw) -> Task:
    """One of four conversions between CSV and JSON."""
    build = draw.variant((_group, _flatten, _patch, _pivot))
    return build(draw)


def _sales(draw: Draw) -> list[tuple[str, str, int, int]]:
    goods, cities = draw.picks(THINGS, 5), draw.picks(CITIES, 4)
    return [
        (draw.choice(cities), draw.choice(goods), draw.number(1, 20), draw.number(100, 999))
        for _ in range(draw.number(30, 50))
    ]


def _group(draw: Draw) -> Task:
    source, out = draw.file(("csv",)), draw.file(("json",))
    sales = _sales(draw)
    result: dict[str, dict[str, dict[str, int]]] = {}
    for city, item, count, price in sales:
        entry = result.setdefault(city, {}).setdefault(item, {"sold": 0, "revenue": 0})
        entry["sold"] += count
        entry["revenue"] += count * price
    data = "city,item,note,count,price\n" + "".join(
        f'{city},{item},"{draw.choice(("ok", "late, but fine", "as agreed, gift"))}",{n},{price}\n'
        for city, item, n, price in sales
    )
    return Task(
        label=f"group {source}",
        instruction=f"Summarise {source} as JSON in {out}. The result is an object with one key "
        "per city; its value is an object with one key per item sold there; and that item's "
        'value is {"sold": total of count, "revenue": total of count times price}, as integers. '
        f"Mind that notes may contain commas. {draw.choice(KEEP)}",
        files={source: data},
        solution=f"""
python3 - <<'END'
import csv, json
result = {{}}
for row in csv.DictReader(open("{source}", newline="")):
    entry = result.setdefault(row["city"], {{}}).setdefault(row["item"], dict(sold=0, revenue=0))
    entry["sold"] += int(row["count"])
    entry["revenue"] += int(row["count"]) * int(row["price"])
json.dump(result, open("{out}", "w"))
END
""",
        expect=(json_value(out, result),),
    )


def _flatten(draw: Draw) -> Task:
    source, out = draw.file(("jsonl",)), draw.file(("csv",))
    lines, table = list[str](), [["id", "name", "city", "tags"]]
    for at in draw.shuffled(range(1, 13)):
        name, city = draw.choice(PEOPLE), draw.choice(CITIES) if draw.number(0, 3) else ""
        user = {"name": name} | ({"city": city} if city else {})
        tags = draw.picks(THINGS, draw.number(0, 3))
        lines.append(json.dumps({"id": at, "user": user, "tags": tags}) + "\n")
        table.append([str(at), name, city, ";".join(tags)])
    table[1:] = sorted(table[1:], key=lambda row: int(row[0]))
    return Task(
        label=f"flatten {source}",
        instruction=f"{source} has one JSON object per line. Convert it to the CSV file {out} with "
        "the header id,name,city,tags: name and city come from the object `user` (an absent "
        "city becomes an empty field), tags are joined by semicolons in their order. Rows are "
        f"sorted by id as a number. {draw.choice(KEEP)}",
        files={source: "".join(lines)},
        solution=f"""
python3 - <<'END'
import csv, json
records = sorted((json.loads(line) for line in open("{source}")), key=lambda item: item["id"])
with open("{out}", "w", newline="") as handle:
    table = csv.writer(handle)
    table.writerow(["id", "name", "city", "tags"])
    for item in records:
        user = item["user"]
        table.writerow([item["id"], user["name"], user.get("city", ""), ";".join(item["tags"])])
END
""",
        expect=(rows(out, table),),
    )


def _patch(draw: Draw) -> Task:
    source, changes = draw.file(("json",)), draw.file(("csv",))
    goods = draw.picks(THINGS, 9)
    catalog = {
        "version": draw.number(1, 20),
        "items": [
            {
                "sku": f"{word[:3]}-{at}",
                "name": word,
                "price": draw.number(100, 999),
                "stock": {"shelf": draw.number(0, 9), "store": draw.number(0, 90)},
            }
            for at, word in enumerate(goods)
        ],
    }
    after = json.loads(json.dumps(catalog))
    deltas = [
        (after["items"][at]["sku"], draw.number(-9, 60)) for at in draw.shuffled(range(9))[:5]
    ]
    for sku, delta in deltas:
        item = next(item for item in after["items"] if item["sku"] == sku)
        item["stock"]["store"] = max(0, item["stock"]["store"] + delta)
    dropped = [item["sku"] for item in after["items"][:2] if item["sku"] not in dict(deltas)]
    dropped = dropped or [after["items"][8]["sku"]]
    after["items"] = [item for item in after["items"] if item["sku"] not in dropped]
    after["version"] += 1
    lines = draw.shuffled(
        [f"{sku},add,{delta}" for sku, delta in deltas] + [f"{sku},drop," for sku in dropped]
    )
    return Task(
        label=f"patch {source}",
        instruction=f"Apply the changes in {changes} (CSV: sku,action,amount) to the catalogue "
        f"{source}, in place. `add` adds the amount, which may be negative, to stock.store of "
        "the item with that sku, but never lets it fall below 0; `drop` removes the item from "
        "the list. Afterwards increase the top-level version by 1. All other values, and the "
        f"order of the items, stay; {changes} stays too.",
        files={
            source: json.dumps(catalog, indent=2) + "\n",
            changes: "sku,action,amount\n" + "\n".join(lines) + "\n",
        },
        solution=f"""
python3 - <<'END'
import csv, json
catalog = json.load(open("{source}"))
for row in csv.DictReader(open("{changes}", newline="")):
    for item in list(catalog["items"]):
        if item["sku"] == row["sku"] and row["action"] == "drop":
            catalog["items"].remove(item)
        elif item["sku"] == row["sku"]:
            item["stock"]["store"] = max(0, item["stock"]["store"] + int(row["amount"]))
catalog["version"] += 1
json.dump(catalog, open("{source}", "w"), indent=2)
END
""",
        expect=(json_value(source, after),),
        changes=(source,),
    )


def _pivot(draw: Draw) -> Task:
    source, out = draw.file(("csv",)), draw.file(("csv",))
    sales = _sales(draw)
    cities = sorted({city for city, _, _, _ in sales})
    goods = sorted({item for _, item, _, _ in sales})
    table: list[list[str]] = [["item", *cities, "total"]]
    for item in goods:
        counts = [sum(n for c, i, n, _ in sales if (c, i) == (city, item)) for city in cities]
        table.append([item, *map(str, counts), str(sum(counts))])
    return Task(
        label=f"pivot {source}",
        instruction=f"Turn {source} (columns city, item, count, price) into a table by item and "
        f"city: {out} is a CSV file whose header is item, then every city in alphabetical "
        "order, then total. There is one row per item, in alphabetical order, holding the sum "
        f"of count per city (0 where nothing was sold) and over all cities. {draw.choice(KEEP)}",
        files={
            source: "city,item,count,price\n"
            + "".join(",".join(map(str, row)) + "\n" for row in sales)
        },
        solution=f"""
python3 - <<'END'
import csv
sold = list(csv.DictReader(open("{source}", newline="")))
cities = sorted({{row["city"] for row in sold}})
with open("{out}", "w", newline="") as handle:
    table = csv.writer(handle)
    table.writerow(["item", *cities, "total"])
    for item in sorted({{row["item"] for row in sold}}):
        counts = [sum(int(row["count"]) for row in sold
                      if row["item"] == item and row["city"] == city) for city in cities]
        table.writerow([item, *counts, sum(counts)])
END
""",
        expect=(rows(out, table),),
    )


def _render(draw: Draw) -> Task:
    """Fill a template once per row of a table."""
    template, table, folder = draw.file(("tmpl",)), draw.file(("csv",)), draw.pick(THINGS)
    hosts = draw.picks(THINGS, draw.number(5, 7))
    default = draw.number(1000, 9999)
    keys = draw.shuffled(("host", "owner", "port", "zone"))
    data = [
        {
            "host": host,
            "owner": draw.choice(PEOPLE),
            "port": "" if at % 3 == 1 else str(draw.number(1000, 9999)),
            "zone": draw.choice(CITIES),
        }
        for at, host in enumerate(hosts)
    ]
    body = f"# {draw.pick(THINGS)}\n" + "".join(f"{key}: {{{{{key}}}}}\n" for key in keys)
    body += (
        f"url: http://{{{{host}}}}.{draw.pick(THINGS)}.example:{{{{port}}}}/\n# {{literal}} $HOME\n"
    )
    results: dict[str, str] = {}
    for row in data:
        done = body
        for key in keys:
            done = done.replace(f"{{{{{key}}}}}", row[key] or str(default))
        results[f"{row['host']}.conf"] = done
    return Task(
        label=f"{template} {folder}",
        instruction=f"Generate one configuration file per row of {table}, as {folder}/HOST.conf "
        f"(HOST is the row's host column; {folder} does not exist yet). Each is the content of "
        f"{template} with every {{{{column}}}} placeholder replaced by the row's value in that "
        f"column. An empty port means {default}. Any other text of the template is copied "
        f"literally, and {folder} holds nothing else. {draw.choice(KEEP)}",
        files={
            template: body,
            table: ",".join(keys)
            + "\n"
            + "".join(",".join(row[key] for key in keys) + "\n" for row in data),
        },
        solution=f"""
python3 - <<'END'
import csv, os
os.mkdir("{folder}")
body = open("{template}").read()
for row in csv.DictReader(open("{table}", newline="")):
    row["port"] = row["port"] or "{default}"
    done = body
    for key, value in row.items():
        done = done.replace("{{{{" + key + "}}}}", value)
    open(f"{folder}/{{row['host']}}.conf", "w").write(done)
END
""",
        expect=(
            names(folder, list(results)),
            *(text(f"{folder}/{name}", content) for name, content in results.items()),
        ),
    )


BUILDERS: dict[str, Builder] = {"tables": _tables, "render": _render}
