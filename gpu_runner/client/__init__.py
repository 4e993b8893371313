"""HTTP client of one OpenAI-compatible server, and what its answers mean. Answers are outside data.

`engine_client` sends; `engine_connections` are its sockets, and `request_progress` knows how far a request got;
`protocol` makes requests and reads answers, `input_lists` those to several inputs; `answers/` check them, and
`vector_length` that vectors are of one length; `engine_info` says who serves; `llama_cpp` and `engine_load` know what
servers name differently; `json_schemas/` are those of structured outputs, `structured_outputs` has the other forms;
`server_sentence` is what may be shown of what a server said; `trace_context` says to which trace a request belongs;
`verbatim_client` passes whole requests on; `reasoning_tags` finds thinking that stands in the text of an answer.
"""

__all__ = [
    "answers",
    "engine_client",
    "engine_connections",
    "engine_info",
    "engine_load",
    "input_lists",
    "json_schemas",
    "llama_cpp",
    "protocol",
    "reasoning_tags",
    "request_progress",
    "server_sentence",
    "structured_outputs",
    "trace_context",
    "vector_length",
    "verbatim_client",
]
