"""Rows as files of a provider's OpenAI Batch API: the answers come hours later, as a file, in any order.

`batch_client` is an `EngineClient` that gathers rows, sends them as one batch and answers each from the batch's files;
`batch_calls` are the calls of the API, `patient_calls` the same of somebody who has hours; `batch_lines` the lines of
its files; `submitted_batches` what is kept of a batch, so that nobody pays for it twice; `provider_leftovers` deletes
what the provider has of one that nobody needs.
"""

__all__ = ["batch_calls", "batch_client", "batch_lines", "patient_calls", "provider_leftovers", "submitted_batches"]
