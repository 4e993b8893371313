"""The fleet's tables: what is kept of runs, leases, requests, instances, and of the database's clock."""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()

# `note`: what the run does, for people. `wait_…`: what it waits for (`wait_reason.WaitReason`), if it waits.
# `declared_dead_at`: when somebody else ended it; NULL: nobody did.
RUNS = sa.Table(
    "batch_runs",
    METADATA,
    sa.Column("run_id", sa.String(64), primary_key=True),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("first_key", sa.String(16), nullable=False),
    sa.Column("last_key", sa.String(16), nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("note", sa.String(300), nullable=False),
    sa.Column("rows_done", sa.Integer, nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Float, nullable=False),
    sa.Column("beat_at", sa.Float, nullable=False),
    sa.Column("wait_kind", sa.String(32)),
    sa.Column("wait_budget_usd", sa.Float),
    sa.Column("wait_spent_usd", sa.Float),
    sa.Column("wait_held_back_usd", sa.Float),
    sa.Column("wait_drain_seconds", sa.Float),
    sa.Column("wait_boot_usd", sa.Float),
    sa.Column("wait_row_usd", sa.Float),
    sa.Column("declared_dead_at", sa.Float),
    sa.Column("wait_code", sa.String(64)),
    sa.Column("wait_status", sa.Integer),
    sa.Column("wait_sentence", sa.String(300)),
    sa.Column("wait_since", sa.Float),
)

# `renewed_at`: when the holder last said what it had done; what comes after it, until the lease's end, was lost.
# Of engines that are paid by the token: `…_usd`, what it cost, and `granted_usd`, what the holder may spend (NULL: no
# budget bounds it). `before_usd`: what it had cost when the dataset's request began.
LEASES = sa.Table(
    "leases",
    METADATA,
    sa.Column("instance", sa.String(200), primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("acquired_at", sa.Float, nullable=False),
    sa.Column("expires_at", sa.Float, nullable=False),
    sa.Column("released_at", sa.Float),
    sa.Column("renewed_at", sa.Float),
    sa.Column("draining_at", sa.Float),
    sa.Column("useful_seconds", sa.Float, nullable=False, server_default="0"),
    sa.Column("wasted_seconds", sa.Float, nullable=False, server_default="0"),
    sa.Column("rows", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("prompt_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("completion_tokens", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("useful_usd", sa.Float, nullable=False, server_default="0"),
    sa.Column("wasted_usd", sa.Float, nullable=False, server_default="0"),
    sa.Column("granted_usd", sa.Float),
    sa.Column("before_usd", sa.Float, nullable=False, server_default="0"),
    sa.Column("reason", sa.String(300), nullable=False, server_default=""),
)
# Those that are over are kept for ever: what looks for live ones reads an index that has no others.
sa.Index("leases_by_dataset", LEASES.c.dataset)
sa.Index(
    "leases_open",
    LEASES.c.dataset,
    sqlite_where=LEASES.c.released_at.is_(None),
    postgresql_where=LEASES.c.released_at.is_(None),
)

# `instances`, `offers`, `pause`: the command. `request`: what is made now ("": nothing), since when. What an operator
# overrides holds for that request. `memory`, `plan`: what the capacity sensor keeps and shows, as JSON. `counted_…`:
# what was spent or is granted, and US dollars per second, when it was last added up (NULL: that is not the most any
# more). `accepted_gates`: names of gates that pause this request no more, as JSON.
DATASETS = sa.Table(
    "datasets",
    METADATA,
    sa.Column("dataset", sa.String(128), primary_key=True),
    sa.Column("instances", sa.Integer, nullable=False),
    sa.Column("request", sa.String(200), nullable=False, server_default=""),
    sa.Column("since", sa.Float, nullable=False, server_default="0"),
    sa.Column("deadline_at", sa.Float),
    sa.Column("deadline_override", sa.Float),
    sa.Column("budget_usd", sa.Float),
    sa.Column("budget_override", sa.Float),
    sa.Column("objective", sa.String(32), nullable=False, server_default=""),
    sa.Column("max_instances", sa.Integer),
    sa.Column("offers", sa.Text, nullable=False, server_default="[]"),
    sa.Column("pause", sa.Text, nullable=False, server_default=""),
    sa.Column("memory", sa.Text, nullable=False, server_default="{}"),
    sa.Column("plan", sa.Text, nullable=False, server_default="{}"),
    sa.Column("updated_at", sa.Float),
    sa.Column("counted_at", sa.Float),
    sa.Column("counted_usd", sa.Float, nullable=False, server_default="0"),
    sa.Column("counted_rate", sa.Float, nullable=False, server_default="0"),
    sa.Column("accepted_gates", sa.Text, nullable=False, server_default="[]"),
)

# `created_at`: billing starts. `notice_at`: it is taken away. `seen_at`: first in the provider's list. `retire_at`:
# since when it takes no new lease and is to end with its last one. `missing_since`: not in the provider's list; kept
# when that is all that is known of its end.
INSTANCES = sa.Table(
    "instances",
    METADATA,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("provider", sa.String(300), nullable=False),
    sa.Column("region", sa.String(300), nullable=False),
    sa.Column("instance_type", sa.String(300), nullable=False),
    sa.Column("gpu", sa.String(300), nullable=False),
    sa.Column("gpus", sa.Integer, nullable=False),
    sa.Column("gpu_memory_gib", sa.Float, nullable=False),
    sa.Column("spot", sa.Boolean, nullable=False),
    sa.Column("price_per_hour", sa.Float, nullable=False),
    sa.Column("clock", sa.Float, nullable=False),
    sa.Column("boot_seconds", sa.Float, nullable=False),
    sa.Column("engine_key", sa.String(300), nullable=False),
    sa.Column("model", sa.String(300), nullable=False),
    sa.Column("max_num_seqs", sa.Integer),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("endpoint", sa.String(300)),
    sa.Column("machine_id", sa.String(200)),
    sa.Column("reason", sa.String(300), nullable=False, server_default=""),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("dataset", sa.String(128), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("ready_at", sa.Float),
    sa.Column("ending_at", sa.Float),
    sa.Column("ended_at", sa.Float),
    sa.Column("notice_at", sa.Float),
    sa.Column("seen_at", sa.Float),
    sa.Column("retire_at", sa.Float),
    sa.Column("missing_since", sa.Float),
    sa.Index("instances_by_state", "state"),
    sa.Index("instances_by_end", "ended_at"),
)

# Which run asks for the rows of which batch object now. `object`: its name below the dataset's `batches/`.
CLAIMS = sa.Table(
    "batch_claims",
    METADATA,
    sa.Column("dataset", sa.String(128), primary_key=True),
    sa.Column("object", sa.String(200), primary_key=True),
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("claimed_at", sa.Float, nullable=False),
)

# `kind`: a `FailureKind`; `reason`: the same for people.
OFFER_FAILURES = sa.Table(
    "offer_failures",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("provider", sa.String(300), nullable=False),
    sa.Column("offer", sa.String(300), nullable=False),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("reason", sa.String(300), nullable=False),
    sa.Column("kind", sa.String(32), nullable=False, server_default="failed"),
)

FACTS = sa.Table(
    "fleet_facts",
    METADATA,
    sa.Column("name", sa.String(64), primary_key=True),
    sa.Column("value", sa.String(300), nullable=False),
)

# The database's clock beside the steady clock of each host that asked for it, when it last did: `low` before, `high`
# after; `jumps`: the sum of all jumps that were known then.
CLOCKS = sa.Table(
    "clocks",
    METADATA,
    sa.Column("host", sa.String(120), primary_key=True),
    sa.Column("wall", sa.Float, nullable=False),
    sa.Column("low", sa.Float, nullable=False),
    sa.Column("high", sa.Float, nullable=False),
    sa.Column("jumps", sa.Float, nullable=False),
)

CLOCK_JUMPS = sa.Table(
    "clock_jumps",
    METADATA,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("at", sa.Float, nullable=False),
    sa.Column("seconds", sa.Float, nullable=False),
)
