"""An engine that behaves like vLLM without a GPU: `python -m gpu_runner.simulator --model NAME`.

    scheduler.py  continuous batching as a pure model of time, slots and KV cache
    engine.py     the model driven by the wall clock
    text.py       deterministic outputs; schema.py and pattern.py make JSON that fits a schema
    requests.py   OpenAI request bodies, read and checked as vLLM does, those of /v1/responses as chats
    replies.py    the answers; pieces.py and responses.py stream them
    faults.py     scripted failures
    metrics.py    vLLM's metric names; request_log.py the engine's own log of what it was asked
    server.py     the HTTP face

Where it differs from vLLM: a token is four characters of a prompt and one word of an answer; chat, completions and
embeddings are served by every model; without a seed the text is a function of the prompt, as if temperature were 0;
streams carry no log probabilities; echo, best_of, /tokenize are not there.

It says everywhere that it is a simulation: the version, the owner of its model, `simulated` in /v1/models.
"""

__all__ = []
