"""Tier 3, SQLite: reports from a database, and repairs of one."""

from __future__ import annotations

from collections.abc import Sequence

from sandboxes.bank.draw import Draw
from sandboxes.bank.expect import Expectation, json_value, query, refused, rows
from sandboxes.bank.task import Builder, Task
from sandboxes.bank.words import CITIES, PEOPLE, THINGS

_HINT = "Python's sqlite3 module is there; a sqlite3 program may not be."


def _made(database: str, sql: str) -> str:
    """Set-up that makes a database."""
    return f"""python3 - <<'END'
import sqlite3
database = sqlite3.connect("{database}")
database.executescript('''{sql}''')
database.close()
END"""


def _python(database: str, body: str) -> str:
    """A solution over an open database, committed at its end."""
    return f"""python3 - <<'END'
import csv, sqlite3
database = sqlite3.connect("{database}")
{body.strip()}
database.commit()
database.close()
END"""


def _inserts(table: str, values: Sequence[Sequence[str | int | None]]) -> str:
    def literal(value: str | int | None) -> str:
        return "NULL" if value is None else f"'{value}'" if isinstance(value, str) else str(value)

    return "".join(
        f"INSERT INTO {table} VALUES ({', '.join(map(literal, row))});\n" for row in values
    )


def _database(draw: Draw) -> Task:
    """One of five jobs on a shop's database."""
    name = f"{draw.pick(THINGS)}.db"
    people = [
        (at + 1, person, draw.choice(CITIES)) for at, person in enumerate(draw.picks(PEOPLE, 8))
    ]
    orders = [
        (at + 1, draw.number(1, 8), draw.number(5, 300), draw.choice(("paid", "open", "void")))
        for at in range(draw.number(30, 45))
    ]
    build = draw.variant((_totals, _duplicates, _migrate, _orphans, _upsert))
    return build(draw, name, people, orders)


_PEOPLE = "CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT);\n"
_ORDERS = (
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, amount INTEGER, state TEXT);\n"
)
type _People = list[tuple[int, str, str]]
type _Orders = list[tuple[int, int, int, str]]


def _same(name: str, table: str, values: Sequence[Sequence[str | int | None]]) -> Expectation:
    return query(name, f"SELECT * FROM {table} ORDER BY 1", values)


def _totals(draw: Draw, name: str, people: _People, orders: _Orders) -> Task:
    out = draw.file(("csv",))
    state = draw.choice(("paid", "open"))
    sums = {person[0]: [0, 0] for person in people}
    for _, customer, amount, its_state in orders:
        if its_state == state:
            sums[customer][0] += 1
            sums[customer][1] += amount
    table = [[who, str(sums[at][0]), str(sums[at][1])] for at, who, _ in people]
    table.sort(key=lambda row: (-int(row[2]), row[0]))
    return Task(
        label=f"totals {name}",
        instruction=f"{name} is an SQLite database with the tables customers (id, name, city) and "
        f"orders (id, customer, amount, state). Write {out}: a CSV file with the header "
        f"name,orders,total and one row per customer, with the number and the total amount of "
        f"that customer's orders in the state '{state}'. Customers without such an order appear "
        "with 0 and 0. Highest total first, equal totals by name. The database must not change. "
        f"{_HINT}",
        setup=_made(
            name, _PEOPLE + _ORDERS + _inserts("customers", people) + _inserts("orders", orders)
        ),
        solution=_python(
            name,
            f"""
result = database.execute('''SELECT name, count(orders.id), coalesce(sum(amount), 0) AS total
  FROM customers LEFT JOIN orders ON customer = customers.id AND state = '{state}'
  GROUP BY customers.id ORDER BY total DESC, name''')
with open("{out}", "w", newline="") as handle:
    csv.writer(handle).writerows([("name", "orders", "total"), *result])
""",
        ),
        expect=(
            rows(out, [["name", "orders", "total"], *table]),
            _same(name, "customers", people),
            _same(name, "orders", orders),
        ),
    )


def _duplicates(draw: Draw, name: str, people: _People, orders: _Orders) -> Task:
    doubled = [*people, *((at + 100, who, city) for at, who, city in draw.shuffled(people)[:4])]
    back = {at + 100: at for at, _, _ in people}
    mixed = [
        (
            at,
            customer + 100
            if (customer + 100, *people[customer - 1][1:]) in doubled and at % 2
            else customer,
            amount,
            state,
        )
        for at, customer, amount, state in orders
    ]
    fixed = [(at, back.get(customer, customer), *rest) for at, customer, *rest in mixed]
    return Task(
        label=f"duplicates {name}",
        instruction=f"In the SQLite database {name} some rows of the table customers occur twice: "
        "same name and city, different id. Keep the row with the lowest id of each, make the "
        "orders of the others (column customer of the table orders) belong to the kept one, and "
        "delete the others. Afterwards the database itself must refuse a second customer with "
        f"the same name and city. Nothing else may change. {_HINT}",
        setup=_made(
            name, _PEOPLE + _ORDERS + _inserts("customers", doubled) + _inserts("orders", mixed)
        ),
        solution=_python(
            name,
            """
keep = "(SELECT min(b.id) FROM customers a JOIN customers b USING (name, city) WHERE a.id = {})"
database.execute("UPDATE orders SET customer = " + keep.format("customer"))
database.execute("DELETE FROM customers WHERE id <> " + keep.format("customers.id"))
database.execute("CREATE UNIQUE INDEX one_each ON customers (name, city)")
""",
        ),
        expect=(
            _same(name, "customers", people),
            _same(name, "orders", fixed),
            refused(
                name,
                f"INSERT INTO customers (name, city) VALUES ('{people[0][1]}', '{people[0][2]}')",
            ),
        ),
    )


def _migrate(_: Draw, name: str, people: _People, orders: _Orders) -> Task:
    cities = sorted({city for _, _, city in people})
    ids = {city: at + 1 for at, city in enumerate(cities)}
    return Task(
        label=f"migrate {name}",
        instruction=f"Normalise the SQLite database {name}. Create a table cities with the columns "
        "id (integer primary key) and name (text, unique): one row per distinct city of the "
        "table customers, numbered from 1 in alphabetical order. Add to customers an integer "
        "column city_id that refers to it, filled for every customer. Leave the column city and "
        f"the table orders as they are. {_HINT}",
        setup=_made(
            name, _PEOPLE + _ORDERS + _inserts("customers", people) + _inserts("orders", orders)
        ),
        solution=_python(
            name,
            """
database.executescript('''
CREATE TABLE cities (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
INSERT INTO cities (name) SELECT DISTINCT city FROM customers ORDER BY city;
ALTER TABLE customers ADD COLUMN city_id INTEGER REFERENCES cities (id);
UPDATE customers SET city_id = (SELECT id FROM cities WHERE cities.name = customers.city);
''')
""",
        ),
        expect=(
            query(
                name,
                "SELECT id, name FROM cities ORDER BY id",
                [(ids[city], city) for city in cities],
            ),
            query(
                name,
                "SELECT id, name, city, city_id FROM customers ORDER BY id",
                [(*person, ids[person[2]]) for person in people],
            ),
            _same(name, "orders", orders),
            refused(name, f"INSERT INTO cities (name) VALUES ('{cities[0]}')"),
        ),
    )


def _orphans(draw: Draw, name: str, people: _People, orders: _Orders) -> Task:
    known = {at for at, _, _ in people if at not in (2, 5)}
    left = [person for person in people if person[0] in known]
    good = [order for order in orders if order[1] in known]
    bad = [order for order in orders if order[1] not in known]
    out = draw.file(("json",))
    return Task(
        label=f"orphans {name}",
        instruction=f"The table orders of the SQLite database {name} has rows whose customer does "
        f"not exist in the table customers. Save them to {out} as a JSON array of objects with "
        "the keys id, customer, amount and state, ordered by id (numbers as numbers), and then "
        f"delete them from the database. All other rows stay. {_HINT}",
        setup=_made(
            name, _PEOPLE + _ORDERS + _inserts("customers", left) + _inserts("orders", orders)
        ),
        solution=_python(
            name,
            f"""
import json
where = "FROM orders WHERE customer NOT IN (SELECT id FROM customers)"
found = database.execute("SELECT id, customer, amount, state " + where + " ORDER BY id")
keys = ("id", "customer", "amount", "state")
with open("{out}", "w") as handle:
    json.dump([dict(zip(keys, row)) for row in found], handle)
database.execute("DELETE " + where)
""",
        ),
        expect=(
            json_value(
                out,
                [
                    dict(zip(("id", "customer", "amount", "state"), order, strict=True))
                    for order in bad
                ],
            ),
            _same(name, "orders", good),
            _same(name, "customers", left),
        ),
    )


def _upsert(draw: Draw, name: str, people: _People, orders: _Orders) -> Task:
    source = draw.file(("csv",))
    moved = {at: draw.pick(CITIES) for at, _, _ in draw.shuffled(people)[:3]}
    new = [(at + 20, who, draw.choice(CITIES)) for at, who in enumerate(draw.picks(PEOPLE, 3))]
    after = [*((at, who, moved.get(at, city)) for at, who, city in people), *new]
    changes = draw.shuffled([*(person for person in after if person[0] in moved), *new])
    return Task(
        label=f"import {name}",
        instruction=f"Import {source} (CSV with the header id,name,city) into the table customers "
        f"of the SQLite database {name}: a customer whose id is already there is updated with "
        f"the row's name and city, any other is inserted. Customers that {source} does not "
        f"mention, and the table orders, stay as they are, and so does {source}. {_HINT}",
        files={source: "id,name,city\n" + "".join(f"{a},{b},{c}\n" for a, b, c in changes)},
        setup=_made(
            name, _PEOPLE + _ORDERS + _inserts("customers", people) + _inserts("orders", orders)
        ),
        solution=_python(
            name,
            f"""
with open("{source}", newline="") as handle:
    for row in csv.DictReader(handle):
        database.execute("INSERT OR REPLACE INTO customers VALUES (:id, :name, :city)", row)
""",
        ),
        expect=(_same(name, "customers", after), _same(name, "orders", orders)),
    )


BUILDERS: dict[str, Builder] = {"database": _database}
