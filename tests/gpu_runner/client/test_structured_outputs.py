"""`choice`, `regex` and `grammar`: what is sent to which server, and what is checked on return."""

from __future__ import annotations

import asyncio
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_engine import ORIGIN, FakeEngine, Sink
from support.http_server import http_server, models

from gpu_runner.client.engine_client import EngineClient, EngineRefused
from gpu_runner.client.llama_cpp import llama_cpp_generation
from gpu_runner.client.protocol import Repair, Requests
from gpu_runner.client.structured_outputs import (
    MAX_MATCHED,
    UnusablePattern,
    compile_choice,
    compile_pattern,
    output_check,
)
from gpu_runner.inference.feed import Feed
from gpu_runner.rows import Batch, Generation, Row, row_key

CHOICE = Generation("completion", "m", {"max_tokens": 5}, structured_outputs={"choice": ["yes", "no"]})
REGEX = Generation("chat", "m", {}, structured_outputs={"regex": "[0-9]{4}"})
GRAMMAR = Generation("chat", "m", {}, structured_outputs={"grammar": 'root ::= "a" | "b"'})


@pytest.mark.parametrize("generation", [CHOICE, REGEX, GRAMMAR])
def test_the_request_has_vllms_field_and_the_row_key_knows_it(generation: Generation) -> None:
    plain = Generation(generation.task, "m", generation.sampling)
    prompt = b'"q"' if generation.task == "completion" else b'[{"role":"user","content":"q"}]'
    body = orjson.loads(Requests(generation).body(prompt))
    assert body.pop("structured_outputs") == generation.structured_outputs
    assert body == orjson.loads(Requests(plain).body(prompt))
    assert row_key(generation, "q") != row_key(plain, "q")
    assert "structured_outputs" not in plain.stated()
    assert Generation(**generation.stated()) == generation


def test_a_repair_asks_for_the_form_and_not_for_json() -> None:
    body = orjson.loads(Requests(REGEX).body(b'[{"role":"user","content":"q"}]', Repair("x", "no match", 1)))
    assert body["messages"][-1]["content"].startswith("This answer does not have the wanted form: no match.")


@given(st.from_regex(r"[a-c]{1,3}(x|yy)*", fullmatch=True), st.text(max_size=8))
def test_a_pattern_matches_the_whole_output_as_pythons_does(fitting: str, other: str) -> None:
    check = compile_pattern(r"[a-c]{1,3}(x|yy)*")
    assert check(fitting) is None
    assert (check(other) is None) == bool(re.fullmatch(r"[a-c]{1,3}(x|yy)*", other))
    assert check(fitting + "\n") is not None


def test_alternatives_at_the_top_are_of_the_whole_pattern() -> None:
    check = compile_pattern("a|b")
    assert check("a") is None and check("b") is None and check("ab") is not None


@pytest.mark.parametrize("pattern", ["(", "(?=a)b", r"(a)\1", "((a{0,30}){0,30}){0,30}", "a{99999}", "[z-a]", "*"])
def test_a_pattern_that_is_none_or_has_no_linear_match_is_refused(pattern: str) -> None:
    with pytest.raises(UnusablePattern):
        compile_pattern(pattern)


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(.*)*x", "(a?){200}a{200}", "[ab]*a[ab]{300}c"])
def test_patterns_that_hang_others_end(pattern: str) -> None:
    assert compile_pattern(pattern)("a" * MAX_MATCHED) is not None


def test_an_output_that_is_too_long_to_match_is_said_to_be_so() -> None:
    found = compile_pattern(".*")("a" * (MAX_MATCHED + 1))
    assert found is not None and "at most 100,000 characters" in found


def test_a_choice_is_one_of_the_texts_as_they_are() -> None:
    check = compile_choice(["yes", "no"])
    assert check("yes") is None and check("Yes") is not None and check("yes ") is not None and check("") is not None
    assert output_check(GRAMMAR) is None and output_check(Generation("chat", "m")) is None


def test_an_output_without_the_form_is_asked_again_and_then_a_dead_letter() -> None:
    async def main() -> None:
        sink = Sink()
        engine = FakeEngine({"r0": "yes", "r1": ["maybe", "no"], "r2": "maybe"}, generation=CHOICE)
        rows = tuple(Row("00000", f"r{i}", f"key-{i}", orjson.dumps(f"r{i}")) for i in range(3))
        feed = Feed(iter([Batch("00000", rows)]), on_row=sink.on_row, on_batch=sink.on_batch)
        await feed.serve(engine, ORIGIN, 4)
        found = sink.outcomes()
        assert (found["r0"].output, found["r0"].tries) == ("yes", 1)
        assert (found["r1"].output, found["r1"].tries) == ("no", 2)
        assert (found["r2"].error, found["r2"].tries) == ("output_invalid", 2)
        assert found["r2"].error_message == "it is none of the 2 choices"

    asyncio.run(main())


@pytest.mark.parametrize(("owner", "taken"), [("vllm", True), ("simulated", True), ("openai", False), ("", False)])
def test_a_server_that_may_ignore_the_field_gets_no_row(owner: str, taken: bool) -> None:
    async def main() -> None:
        routes = {"/v1/models": models({"id": "m", "owned_by": owner})}
        async with http_server(routes) as url, EngineClient(url, REGEX) as engine:
            if taken:
                await engine.info()
                return
            with pytest.raises(EngineRefused, match=r"output.regex: expected vLLM.+found a server of"):
                await engine.info()
        async with http_server(routes) as url, EngineClient(url, Generation("chat", "m")) as engine:
            await engine.info()

    asyncio.run(main())


def test_llama_cpp_gets_its_own_grammar_and_no_regular_expression() -> None:
    choice = Generation("chat", "m", {}, structured_outputs={"choice": ['say "a"', "b\n", "é"]})
    sent = llama_cpp_generation(choice, None)
    assert sent.sampling["grammar"] == r'root ::= "say \"a\"" | "b\n" | "é"' and sent.structured_outputs is None
    assert llama_cpp_generation(GRAMMAR, None).sampling["grammar"] == 'root ::= "a" | "b"'
    with pytest.raises(ValueError, match=r"output.regex: llama.cpp has grammars and JSON schemas only"):
        llama_cpp_generation(REGEX, None)


@pytest.mark.parametrize("pattern", ["a)|(b", "a|b)", ")("])
def test_a_pattern_that_is_whole_only_within_another_one_is_none(pattern: str) -> None:
    with pytest.raises(UnusablePattern):
        compile_pattern(pattern)
