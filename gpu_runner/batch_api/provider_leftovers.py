"""What a provider still has of a batch of which nobody asks for a row any more: files are deleted, work is cancelled.

Each call is made once: what fails is left, with its record, to the next run or to `gc`.
"""

from __future__ import annotations

from gpu_runner.batch_api.batch_calls import BatchCalls, BatchState
from gpu_runner.batch_api.submitted_batches import SubmittedBatch
from gpu_runner.client.protocol import RequestDenied, Transient

LISTED_SECONDS = 600.0  # a batch that is not listed so long after its creation is not there
NOT_IMPLEMENTED = 501
NOT_THERE = frozenset({404, 410})


async def clear(record: SubmittedBatch, calls: BatchCalls, now: float) -> bool:
    """Returns whether nothing is left, so that the record may go. Raises as `calls`."""
    state = await _look(record, calls)
    if state is not None and not state.over:
        await calls.cancel(state.batch_id)
        return False
    if state is None and not record.batch_id and now - record.created_at < LISTED_SECONDS and record.input_file_id:
        return False
    files = (
        [record.input_file_id] if record.input_file_id else await calls.files_named(record.file_name, record.created_at)
    )
    files += [state.output_file_id, state.error_file_id] if state is not None else []
    for file_id in filter(None, files):
        try:
            await calls.delete(file_id)
        except RequestDenied:
            pass  # it is not there, or is never deleted
        except Transient as error:
            if error.status != NOT_IMPLEMENTED:
                raise
    return True


async def _look(record: SubmittedBatch, calls: BatchCalls) -> BatchState | None:
    if not record.batch_id:
        return await calls.find(record.key, record.input_file_id, record.created_at) if record.input_file_id else None
    try:
        return await calls.look(record.batch_id)
    except RequestDenied as error:
        if error.status not in NOT_THERE:
            raise
        return None
