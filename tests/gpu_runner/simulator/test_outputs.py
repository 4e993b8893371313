"""What the simulator answers: texts, lengths, vectors, and JSON that fits its schema."""

from __future__ import annotations

import math
import re
import statistics
import time
from random import Random
from typing import Any

import jsonschema_rs
import orjson
import pytest

from gpu_runner.simulator import generated_text, replies
from gpu_runner.simulator.pattern import matching
from gpu_runner.simulator.request_bodies import Request, parse
from gpu_runner.simulator.request_errors import ApiError
from gpu_runner.simulator.schema import instance

VOICE = replies.ResponseGenerator("m", 4096, generated_text.Lengths.parse("fixed:20"), seed=0, dimensions=32)


def chat(content: str = "Hello", **fields: Any) -> Request:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return parse("chat", orjson.dumps(body), "m", 4096)


def answer(request: Request, voice: replies.ResponseGenerator = VOICE) -> replies.Answer:
    return replies.answers(voice, request)[0]


def test_the_same_request_gets_the_same_answer_and_any_other_another() -> None:
    same = answer(chat())
    assert answer(chat()) == same
    others = [
        answer(chat("Hallo")),
        answer(chat(seed=1)),
        answer(chat(), replies.ResponseGenerator("m", 4096, VOICE.lengths, 7, 32)),
    ]
    assert len({same.text, *[other.text for other in others]}) == 4


def test_ten_thousand_prompts_get_ten_thousand_answers() -> None:
    assert len({answer(chat(f"question {n}")).text for n in range(10_000)}) == 10_000


def test_an_answer_that_fits_stops_and_counts_its_end_token() -> None:
    found = answer(chat())
    assert (found.finish_reason, found.tokens, len(found.text.split())) == ("stop", 20, 19)


def test_max_tokens_cuts_the_same_text_short() -> None:
    whole, cut = answer(chat()), answer(chat(max_tokens=5))
    assert (cut.finish_reason, cut.tokens) == ("length", 5)
    assert whole.text.startswith(cut.text + " ")


def test_the_context_cuts_an_answer_too() -> None:
    request = parse("completion", orjson.dumps({"prompt": [1] * 30, "max_tokens": 32}), "m", 32)
    voice = replies.ResponseGenerator("m", 32, VOICE.lengths, 0, 32)
    found = answer(request, voice)
    assert (found.finish_reason, found.tokens) == ("length", 2)


def test_ignore_eos_writes_up_to_max_tokens_and_min_tokens_puts_the_end_off() -> None:
    assert answer(chat(max_tokens=100, ignore_eos=True)).tokens == 100
    assert answer(chat(max_tokens=100, min_tokens=50)).tokens > 50


def test_a_stop_string_ends_the_text_before_it() -> None:
    word = answer(chat()).text.split()[6]
    found = answer(chat(stop=[word]))
    assert (found.finish_reason, found.stop_reason) == ("stop", word)
    assert word not in found.text and found.tokens < 20


def test_n_choices_differ() -> None:
    assert len({a.text for a in replies.answers(VOICE, chat(n=3, temperature=1))}) == 3


@pytest.mark.parametrize("wrong", ["fixed", "fixed:x", "uniform:9:3", "lognormal:5", "normal:1:2", "fixed:0", ""])
def test_a_wrong_length_distribution_says_what_was_expected(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected fixed:N, uniform:LOW:HIGH or lognormal:MEAN:CAP, found"):
        generated_text.Lengths.parse(wrong)


def lengths_of(spec: str) -> list[int]:
    keys = [generated_text.request_key("m", str(n), None) for n in range(5000)]
    return [generated_text.natural_length(key, generated_text.Lengths.parse(spec)) for key in keys]


def test_lengths_follow_their_distribution() -> None:
    assert set(lengths_of("fixed:7")) == {7}
    uniform = lengths_of("uniform:10:20")
    assert set(uniform) == set(range(10, 21))
    lognormal = lengths_of("lognormal:300:100000")
    assert statistics.mean(lognormal) == pytest.approx(300, rel=0.05)
    assert statistics.median(lognormal) == pytest.approx(300 * math.exp(-(0.8**2) / 2), rel=0.05)
    assert max(lengths_of("lognormal:300:2000")) == 2000
    assert min(lognormal) >= 1


def test_embeddings_have_length_one_and_depend_on_the_text() -> None:
    request = parse("embedding", orjson.dumps({"input": ["a", "b", "a"]}), "m", 4096)
    one, two, again = replies.vectors(VOICE, request)
    assert one == again != two
    assert [len(v) for v in (one, two)] == [32, 32]
    assert math.hypot(*one) == pytest.approx(1.0)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 5},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 2, "uniqueItems": True},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "person": PERSON,
    "list of people": {"type": "array", "items": PERSON, "minItems": 1, "maxItems": 2},
    "references": {
        "$defs": {"p": PERSON},
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/p"}},
        "required": ["x"],
    },
    "tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "number", "minimum": -1, "maximum": 1},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["value", "children"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "linked list": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"],
    },
    "choices": {"anyOf": [{"type": "string"}, {"type": "integer"}, {"const": {"a": [1, None]}}]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
        ]
    },
    "types": {"type": ["string", "null", "integer"]},
    "pattern": {"type": "string", "pattern": r"^[A-Z]{2}-\d{3,5}(x|yz)?$"},
    "formats": {"type": "array", "prefixItems": [{"type": "string", "format": f} for f in ("date", "uuid", "ipv4")]},
    "number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.001},
    "below": {"type": "integer", "maximum": -5},
    "steps": {"type": "integer", "multipleOf": 2.5, "minimum": 1, "maximum": 11},
    "cents": {"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1},
    "many": {"type": "object", "minProperties": 3, "additionalProperties": {"type": "integer"}},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
    "long": {"type": "string", "minLength": 300},
    "short": {"type": "string", "maxLength": 1},
    "anything": {},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_structured_output_validates_against_its_schema(name: str) -> None:
    validator = jsonschema_rs.validator_for(SCHEMAS[name], validate_formats=True)
    for seed in range(200):
        value = instance(SCHEMAS[name], Random(seed))
        assert not list(validator.iter_errors(value)), value


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nonsense"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "http://elsewhere"},
        {"$ref": "#"},
        {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "string", "pattern": "(?=x)y"},
        {"type": "string", "pattern": "[a-z]{10}", "maxLength": 3},
        "text",
    ],
)
def test_a_schema_that_cannot_be_met_is_refused_like_a_grammar(schema: Any) -> None:
    with pytest.raises(ApiError, match="Grammar error") as refused:
        answer(chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}))
    assert refused.value.status == 400


PATTERNS = [
    r"abc",
    r"[a-c]{3}",
    r"\d{2}:\d{2}",
    r"(red|green|blue)( light)?",
    r"^\w+@\w+\.com$",
    r"[^a-z]{4,6}",
    r"a{2,}b*c?",
    r"(?:x(1|2)){2}",
    r"[\d.-]+",
    r"\D\S\W",
    r"a+?\$",
    r"[]x]",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_generated_strings_match_their_pattern(pattern: str) -> None:
    for seed in range(100):
        assert re.fullmatch(pattern, matching(pattern, Random(seed)))


@pytest.mark.parametrize("pattern", ["(?=x)", r"(a)\1", "a)", "(a", "[a", "a{x}", "*", "\\"])
def test_a_pattern_that_is_not_understood_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match="not understood"):
        matching(pattern, Random(0))


LARGE = [
    "a{1000000000}",
    "a{" + "9" * 5000 + "}",
    "(){1000000000}",
    "((a{1000}){1000}){1000}",
    "(((((a{1,9}){99}){99}){99}){99}){99}",
    "[\x00-\U0010ffff]",
    "(" * 5000 + "a" + ")" * 5000,
    "[ab]{1000000000,}",
    "(a|b{1000000000})",
    "[" + "a-z" * 5000 + "]",
    "[^" + "a" * 200_000 + "]",
]


@pytest.mark.slow
@pytest.mark.parametrize("pattern", LARGE, ids=range(len(LARGE)))
def test_a_pattern_that_asks_for_too_much_is_refused_at_once(pattern: str) -> None:
    started = time.process_time()
    with pytest.raises(ValueError, match="pattern: expected") as refused:
        matching(pattern, Random(0))
    assert time.process_time() - started < 2 and len(str(refused.value)) < 300


def test_a_pattern_that_asks_for_too_much_is_the_400_of_a_grammar() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "string", "pattern": LARGE[0]}}}
    with pytest.raises(ApiError, match="Grammar error") as refused:
        answer(chat(response_format=wanted))
    assert refused.value.status == 400


def test_a_long_string_within_the_bound_is_made() -> None:
    assert matching("(ab){20000}", Random(0)) == "ab" * 20_000


def test_json_that_does_not_fit_max_tokens_is_cut_and_says_so() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": PERSON}}
    whole, cut = answer(chat(response_format=wanted)), answer(chat(response_format=wanted, max_tokens=3))
    assert whole.finish_reason == "stop"
    assert (cut.finish_reason, cut.tokens, whole.text.startswith(cut.text)) == ("length", 3, True)


def test_structured_outputs_take_json_regex_and_choice() -> None:
    assert jsonschema_rs.is_valid(PERSON, orjson.loads(answer(chat(structured_outputs={"json": PERSON})).text))
    assert re.fullmatch("[xy]{3}", answer(chat(structured_outputs={"regex": "[xy]{3}"})).text)
    assert answer(chat(structured_outputs={"choice": ["red", "green"]})).text in ("red", "green")
    assert isinstance(orjson.loads(answer(chat(response_format={"type": "json_object"})).text), dict)
