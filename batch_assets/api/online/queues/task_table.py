"""The table of tasks in SQLite: its schema, and what is done to it. Each function is part of a transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from batch_assets.api.online.queues.queue_protocol import (
    DEAD_LETTER_SECONDS,
    RESULT_SECONDS,
    Claim,
    DeadLetter,
    KeyReused,
    OnceKey,
    StoredTask,
    dead_letter,
)
from batch_assets.api.online.queues.tasks import OnlineTask, TaskResult, read_task

MOST_FORGOTTEN = 5_000  # rows of one transaction

# `state`: 0 not answered, 1 answered, 2 dead letter. `since`: when its lifetime began. `due`: not to be claimed before.
SCHEMA = """
CREATE TABLE IF NOT EXISTS tasks (
    number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, packed BLOB NOT NULL,
    state INTEGER NOT NULL DEFAULT 0, failures INTEGER NOT NULL DEFAULT 0, returned INTEGER NOT NULL DEFAULT 0,
    deliveries INTEGER NOT NULL DEFAULT 0,
    created REAL NOT NULL, since REAL NOT NULL, due REAL NOT NULL DEFAULT 0, finished REAL, code TEXT, result BLOB,
    once TEXT UNIQUE, fingerprint TEXT);
CREATE INDEX IF NOT EXISTS tasks_by_state ON tasks (state, finished);
"""


def insert(db: sqlite3.Connection, task: OnlineTask, packed: bytes, once: OnceKey | None) -> None:
    """A new task, which waits."""
    db.execute(
        "INSERT INTO tasks (id, tenant, packed, created, since, once, fingerprint) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (task.task_id, task.tenant, packed, task.created_at, task.created_at)
        + ((None, None) if once is None else (once.name, once.fingerprint)),
    )


def mark_delivered(db: sqlite3.Connection, consumer: str, task_id: str, receipt: str) -> Claim | None:
    """Count a delivery; None: the task was answered meanwhile, or is none."""
    row = db.execute(
        "UPDATE tasks SET deliveries = deliveries + 1 WHERE id = ? AND state = 0 "
        "RETURNING packed, failures, returned, deliveries, since",
        (task_id,),
    ).fetchone()
    if row is None or (task := read_task(task_id, row[0])) is None:
        return None
    return Claim(task, consumer, receipt, row[1], row[2], row[3], row[4] + task.lifetime)


def store_result(db: sqlite3.Connection, task_id: str, finished_at: float, packed: bytes) -> bool:
    """Keep a result instead of what was asked. False: it has one."""
    done = db.execute(
        "UPDATE tasks SET state = 1, finished = ?, result = ?, packed = x'' WHERE id = ? AND state = 0",
        (finished_at, packed, task_id),
    )
    return done.rowcount > 0


def give_back(db: sqlite3.Connection, task_id: str, due: float, *, charged: bool) -> bool:
    """A task that is to be tried again. False: it has a result."""
    done = db.execute(
        "UPDATE tasks SET failures = failures + ?, returned = returned + ?, deliveries = 0, due = ? "
        "WHERE id = ? AND state = 0",
        (int(charged), int(not charged), due, task_id),
    )
    return done.rowcount > 0


def bury(db: sqlite3.Connection, task_id: str, result: TaskResult, packed: bytes) -> bool:
    """A dead letter, with its result and what was asked. False: it has a result."""
    code = result.error.code if result.error is not None else ""
    done = db.execute(
        "UPDATE tasks SET state = 2, finished = ?, result = ?, code = ?, failures = ? WHERE id = ? AND state = 0",
        (result.finished_at, packed, code, result.tries, task_id),
    )
    return done.rowcount > 0


def dead_letters(db: sqlite3.Connection, most: int) -> list[DeadLetter]:
    """Newest first, read without what was asked."""
    rows = db.execute(
        "SELECT id, substr(packed, 1, instr(packed, x'0a') - 1), code, failures, finished FROM tasks "
        "WHERE state = 2 ORDER BY finished DESC LIMIT ?",
        (most,),
    ).fetchall()
    read = ((read_task(row[0], row[1]), *row[2:]) for row in rows)
    return [dead_letter(task, code, failures, died) for task, code, failures, died in read if task is not None]


def revive(db: sqlite3.Connection, task_ids: Sequence[str], now: float) -> list[tuple[str, str]]:
    """Dead letters wait again. Returns (tenant, id) of those that were."""
    found = []
    for task_id in dict.fromkeys(task_ids):
        row = db.execute(
            "UPDATE tasks SET state = 0, failures = 0, returned = 0, deliveries = 0, since = ?, due = 0, "
            "finished = NULL, code = NULL, result = NULL WHERE id = ? AND state = 2 RETURNING tenant",
            (now, task_id),
        ).fetchone()
        if row is not None:
            found.append((row[0], task_id))
    return found


def unanswered(db: sqlite3.Connection) -> tuple[list[tuple[str, str, float]], int]:
    """(id, tenant, when it is due) of all that wait for an answer, oldest first; how many dead letters there are."""
    rows = db.execute("SELECT id, tenant, due FROM tasks WHERE state = 0 ORDER BY number").fetchall()
    return rows, db.execute("SELECT count(*) FROM tasks WHERE state = 2").fetchone()[0]


def known(db: sqlite3.Connection, once: OnceKey, now: float) -> str | None:
    """The task that came with this key, as long as its result is kept. Raises KeyReused."""
    old = now - RESULT_SECONDS
    db.execute("UPDATE tasks SET once = NULL WHERE once = ? AND state != 0 AND finished <= ?", (once.name, old))
    row = db.execute("SELECT id, fingerprint FROM tasks WHERE once = ?", (once.name,)).fetchone()
    if row is None:
        return None
    if row[1] != once.fingerprint:
        raise KeyReused
    return str(row[0])


def stored(db: sqlite3.Connection, task_id: str, now: float) -> StoredTask | None:
    """What can be said of a task; None: there is none, or its result is not kept any more."""
    row = db.execute("SELECT tenant, created, result, finished FROM tasks WHERE id = ?", (task_id,)).fetchone()
    if row is None or (row[3] is not None and row[3] <= now - RESULT_SECONDS):
        return None
    return StoredTask(task_id, row[0], row[1], row[2])


def forget(db: sqlite3.Connection, now: float) -> tuple[int, bool]:
    """Delete what was kept long enough. Returns how many dead letters are left, and whether there is more to delete."""
    more = False
    for state, kept in ((1, RESULT_SECONDS), (2, DEAD_LETTER_SECONDS)):
        done = db.execute(
            "DELETE FROM tasks WHERE number IN "
            "(SELECT number FROM tasks WHERE state = ? AND finished <= ? ORDER BY finished LIMIT ?)",
            (state, now - kept, MOST_FORGOTTEN),
        )
        more |= done.rowcount >= MOST_FORGOTTEN
    return int(db.execute("SELECT count(*) FROM tasks WHERE state = 2").fetchone()[0]), more
