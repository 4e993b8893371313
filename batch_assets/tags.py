"""Every tag that we write on runs, backfills and events, and Dagster's own that we read: one name for each.

Dagster's stand in dagster/_core/storage/tags.py and dagster/_core/definitions/data_version.py.
"""

from __future__ import annotations

# A request: a run of `prompts` that asks for its dataset, or a backfill.
REFRESH_TAG = "batch/refresh"
REDRIVE_TAG = "batch/redrive"
REDRIVE_ERROR_TAG = "batch/redrive_error"  # of a re-drive: the error code of the dead letters that it is for
REQUEST_TAG = "batch/request"
ENDPOINT_TAG = "batch/endpoint"
SIMULATE_TAG = "batch/simulate"  # "true": made-up texts of simulated providers will do, where there is no fleet.yaml
REGENERATE_TAG = "batch/regenerate"  # of a refresh: "all", or a condition for the rows that are asked again
CANCELED_TAG = "batch/canceled"  # on a request that `batch-assets run` gave up: nothing more is started for it
ROWS_TAG = "batch/rows"  # of a trial: how many rows it is to make, in whole batches
REFUSED_TAG = "batch/refused"  # on a run whose engine refuses every request: its own run id, as retries copy tags
LAUNCH_TAG = "batch/launch"  # of one launch, to know its run by

# A chain: refreshes of one dataset after the other, down to the one that was asked for, each with a share of the whole.
UPSTREAM_TAG = "batch/upstream"  # on each of them: the dataset that is brought up to date, with all that it reads
AUTOMATIC_TAG = "batch/automatic"  # on a refresh that Dagster's automation has started, because a table was published
CHAIN_TAG = "batch/chain"  # the run that began the chain
CHAIN_SINCE_TAG = "batch/chain_since"  # Unix seconds by the fleet's database
CHAIN_DEADLINE_TAG = "batch/chain_deadline"  # of the whole, a moment
STREAMING_TAG = "batch/streaming"  # on a refresh that reads the batches that are committed so far: "true"
CHAIN_BUDGET_TAG = "batch/chain_budget_usd"  # of the whole

# What a run may ask of the endpoint.
TIMEOUT_TAG = "batch/timeout"
CONCURRENCY_TAG = "batch/concurrency"
REQUESTS_PER_MINUTE_TAG = "batch/requests_per_minute"
TOKENS_PER_MINUTE_TAG = "batch/tokens_per_minute"

# What is wanted of a request.
DEADLINE_TAG = "batch/deadline"
BUDGET_TAG = "batch/budget_usd"
OBJECTIVE_TAG = "batch/objective"
INSTANCES_TAG = "batch/max_instances"
ACCEPT_GATES_TAG = "batch/accept_gates"  # names of gates that do not pause it, with commas between them

PUBLISH_TAG = "batch/publish"
PUBLISH_VOID_TAG = "batch/publish_void"  # on a publication whose table was lost, or that failed before a new request

# Dagster's. An event carries all five of these, or its staleness is wrong for ever.
DATA_VERSION_TAG = "dagster/data_version"
CODE_VERSION_TAG = "dagster/code_version"
INPUT_DATA_VERSION_TAG = "dagster/input_data_version"
INPUT_EVENT_POINTER_TAG = "dagster/input_event_pointer"
USER_PROVIDED_TAG = "dagster/data_version_is_user_provided"

BACKFILL_TAG = "dagster/backfill"
PARTITION_TAG = "dagster/partition"
RANGE_START_TAG = "dagster/asset_partition_range_start"
RANGE_END_TAG = "dagster/asset_partition_range_end"
WILL_RETRY_TAG = "dagster/will_retry"
RETRY_RUN_TAG = "dagster/auto_retry_run_id"
RETRY_NUMBER_TAG = "dagster/retry_number"
PRIORITY_TAG = "dagster/priority"
K8S_CONFIG_TAG = "dagster-k8s/config"  # read by dagster-k8s when it makes the run's Job
