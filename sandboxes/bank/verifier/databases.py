"""What an SQLite database holds and refuses; it is opened as a copy."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from typing import Any

from .files import WRONG as WRONG_FILE
from .files import first_difference, read
from .scratch import scratch

WRONG = (*WRONG_FILE, sqlite3.Error)


def query(path: str, sql: str, result: list[list[Any]]) -> str | None:
    """See `expect.query`."""
    with _database(path) as database:
        found = [list(row) for row in database.execute(sql).fetchmany(len(result) + 1)]
    return None if found == result else f"first that differs: {first_difference(found, result)}"


def refused(path: str, sql: str) -> str | None:
    """See `expect.refused`."""
    with _database(path) as database:
        try:
            database.execute(sql)
        except sqlite3.IntegrityError:
            return None
    return f"accepts {sql}"


@contextmanager
def _database(path: str) -> Generator[sqlite3.Connection]:
    """A connection to a copy of a database, journal included."""
    with scratch() as folder:
        copy = os.path.join(folder, "copy.db")
        for suffix in ("", "-wal", "-journal"):
            if not suffix or os.path.lexists(path + suffix):
                with open(copy + suffix, "wb") as handle:
                    handle.write(read(path + suffix))
        with closing(sqlite3.connect(copy)) as connection:
            yield connection
