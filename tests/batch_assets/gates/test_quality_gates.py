import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.snapshots import ORIGIN

from batch_assets.catalog.ledger import gate_event
from batch_assets.gates.quality_gates import (
    GateBounds,
    GateTrip,
    QualityGates,
    RateDetector,
    Rule,
    ScoreBound,
    marked_rows,
    mean_score,
)
from batch_assets.gates.refusals import is_refusal
from batch_assets.gates.similar_outputs import SimilarTextsBefore
from batch_assets.gates.text_features import is_in_other_language
from gpu_runner.answers import AnswerParts, ToolCall
from gpu_runner.rows import Outcome
from resources.store.row_condition import BadCondition

SCHEMA = {"type": "object", "properties": {"score": {"type": "integer"}, "label": {"type": "string"}}}


def row(number: int, output: str | None = "a good answer", finish_reason: str = "stop", **other: object) -> Outcome:
    dead = output is None
    base = Outcome(
        f"row-{number}", "key", output, None if dead else finish_reason, 10, 5, 1, "invalid_output" if dead else None,
        None, ORIGIN, 1_700_000_000.0, 0.5,
    )  # fmt: skip
    return replace(base, **other)  # type: ignore[arg-type]


def trips(gates: QualityGates, rows: list[Outcome]) -> list[tuple[int, GateTrip]]:
    return [(number, trip) for number, one in enumerate(rows, 1) for trip in gates.note(one)]


def first(bound: float, least: int, marks: list[bool]) -> int | None:
    detector = RateDetector(bound, least)
    return next((number for number, marked in enumerate(marks, 1) if detector.add(marked)), None)


def test_rows_that_turn_bad_are_seen_within_a_few_hundred() -> None:
    assert first(0.5, 200, [False] * 500 + [True] * 500) == 700
    assert first(0.5, 20, [False] * 500 + [True] * 500) is not None
    drawn = random.Random(1)
    found = first(0.5, 200, [False] * 500 + [drawn.random() < 0.75 for _ in range(2000)])
    assert found is not None and 700 <= found < 1100
    found = first(0.01, 200, [False] * 500 + [drawn.random() < 0.2 for _ in range(2000)])
    assert found is not None and 700 <= found < 900


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0.01, 0.1, 0.5, 0.9])
def test_a_rate_at_its_bound_trips_nothing(bound: float) -> None:
    drawn = random.Random(2)
    assert first(bound, 20, [drawn.random() < bound for _ in range(100_000)]) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), max_size=300), st.floats(0.01, 0.99))
def test_a_mean_of_zeros_and_ones_is_a_rate(marks: list[bool], bound: float) -> None:
    one, other = RateDetector(bound, 20), RateDetector(bound, 20)
    for marked in marks:
        assert one.add(marked) == other.add(float(marked))


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0.1, 0.5, 0.9])
def test_a_mean_at_its_bound_trips_nothing_and_a_worse_one_does(bound: float) -> None:
    """Of values between 0 and 1, however they are spread."""
    for shape in (0.3, 5.0, 50.0):
        drawn, detector = random.Random(3), RateDetector(bound, 20)
        rows = (drawn.betavariate(bound * shape, (1 - bound) * shape) for _ in range(50_000))
        assert not any(detector.add(value) for value in rows), shape
        worse = bound + (1 - bound) / 2
        values = [drawn.betavariate(worse * shape, (1 - worse) * shape) for _ in range(2000)]
        trips = (number for number, value in enumerate(values) if detector.add(value))
        assert next(trips) < 1900, shape


def test_the_mean_of_a_judges_scores_has_a_gate() -> None:
    score = ScoreBound(("clear", "right"), 1, 5, least=3)
    gates = QualityGates(GateBounds(score=score, least_rows=50))
    drawn = random.Random(4)

    def votes(first: int, least: int, most: int) -> list[Outcome]:
        scores = [json.dumps({"reason": "", "clear": 3, "right": drawn.randint(least, most)}) for _ in range(400)]
        return [row(first + number, text) for number, text in enumerate(scores)]

    assert not trips(gates, votes(0, 2, 5))
    for output in ("no JSON", "[]", '{"clear": 1}', '{"clear": true, "right": 1}', "5"):
        assert not trips(gates, [row(number, output) for number in range(400)]), "what is no vote counts neither way"
    ((number, trip),) = trips(gates, votes(1000, 1, 2))
    assert trip.gate == "judge_score" and number >= 49
    mean, bound = trip.rate_and_bound
    assert bound == 3 and 2.0 <= mean < 2.6
    assert trip.describe().startswith(f"gate judge_score: the mean score of the last {trip.stretch.rows} rows is 2.")
    assert len(trip.row_ids) == 10
    event = gate_event("scores", trip)
    assert event.metadata["rate"].value == pytest.approx(mean, abs=1e-6) and "marked" not in event.metadata


def test_the_mean_score_of_rows_is_that_of_their_votes() -> None:
    texts = ['{"clear": 1, "right": 4}', '{"clear": 3, "right": 3.5}', '{"clear": 5}', "no JSON", "5", None]
    rows = [row(number, text) for number, text in enumerate(texts)]
    assert mean_score(rows, ("clear", "right")) == 2.875
    assert mean_score(rows, ("clear",)) == 3.0
    assert mean_score(rows, ()) is None and mean_score(rows[3:], ("clear",)) is None


def test_a_bad_place_of_the_source_trips_nothing() -> None:
    assert first(0.5, 200, [False] * 300 + [True] * 110 + [False] * 300 + [True] * 110 + [False] * 9000) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.booleans(), max_size=400), st.floats(0.01, 0.99))
def test_a_stretch_is_of_the_last_rows_and_passes_the_bound(marks: list[bool], bound: float) -> None:
    detector = RateDetector(bound, 20)
    for number, marked in enumerate(marks, 1):
        if found := detector.add(marked):
            last = marks[number - found.rows : number]
            assert len(last) >= 20 and sum(last) == found.marked
            assert found.marked / found.rows > bound


@pytest.mark.parametrize(
    ("gate", "bad"),
    [
        ("dead", {"output": None}),
        ("empty", {"output": " \n"}),
        ("cut", {"finish_reason": "length"}),
        ("refused", {"output": "I'm sorry, but I can't assist with that request."}),
        ("refused", {"parts": AnswerParts(refusal="no")}),
        (
            "repeated",
            {"output": "The same long sentence, word for word, for whatever the prompt was asking about here."},
        ),
        ("length", {"output": "x" * 50}),
    ],
)
def test_each_gate_says_what_it_has_seen(gate: str, bad: dict[str, object]) -> None:
    bounds = GateBounds(dead=0.5, empty=0.5, cut=0.5, refused=0.5, repeated=0.9, length=0.5, letters=(3, 40))
    if gate in ("empty", "refused", "repeated"):
        bounds = replace(bounds, length=None)
    gates = QualityGates(bounds)
    good = [row(number, f"good answer {number}") for number in range(300)]
    assert not trips(gates, good)
    found = trips(gates, [row(number, **bad) for number in range(300, 700)])  # type: ignore[arg-type]
    number, trip = found[0]
    assert trip.gate == gate and number >= 200 and len(found) == 1
    assert len(trip.row_ids) == 10 and trip.row_ids[-1] == f"row-{299 + number}"
    said = trip.describe()
    assert said.startswith(f"gate {gate}: ") and "rows (100%)" in said and "sorry" not in said


GERMAN = "Das ist eine Antwort in einer anderen Sprache als der, die gewünscht war, und zwar die Nummer {}."
ENGLISH = "This is an answer in the language that was asked for, and it is the one with the number {}."


def test_outputs_in_another_language_have_a_gate() -> None:
    gates = QualityGates(GateBounds(wrong_language=0.5, languages=("en", "fr")))
    assert not trips(gates, [row(number, ENGLISH.format(number)) for number in range(300)])
    found = trips(gates, [row(number, GERMAN.format(number)) for number in range(300, 800)])
    ((number, trip),) = found
    assert trip.gate == "wrong_language" and 100 <= number <= 240, "it looks at each row once one is marked"
    assert trip.describe().startswith("gate wrong_language: ") and "are in another language" in trip.describe()
    assert not trips(gates, [row(number, GERMAN.format(number)) for number in range(800, 900)])


def words(drawn: random.Random, number: int) -> list[str]:
    return [f"word{drawn.randrange(2000)}" for _ in range(number)]


def test_outputs_that_nearly_repeat_earlier_ones_have_a_gate() -> None:
    drawn = random.Random(5)
    gates = QualityGates(GateBounds(repeated=0.5, near_repeated=0.5))
    assert not trips(gates, [row(number, " ".join(words(drawn, 60))) for number in range(400)])
    few = [words(drawn, 60) for _ in range(20)]
    outputs = [[*drawn.choice(few)[:-1], f"word{drawn.randrange(2000)}"] for _ in range(600)]  # two of 58 runs differ
    ((number, trip),) = trips(gates, [row(400 + number, " ".join(one)) for number, one in enumerate(outputs)])
    assert trip.gate == "near_repeated" and number < 400
    assert "nearly repeat another output" in trip.describe()


def test_answers_that_share_half_of_their_words_or_are_short_nearly_repeat_nothing() -> None:
    drawn = random.Random(6)
    shared = words(drawn, 40)
    gates = QualityGates(GateBounds(near_repeated=0.05, least_rows=20))
    assert not trips(gates, [row(number, " ".join(shared + words(drawn, 40))) for number in range(1500)])
    assert not trips(gates, [row(number, "A short answer.") for number in range(1500)])
    marked, looked_at = gates.counted([row(number) for number in range(1500)])
    assert marked["near_repeated"] <= 2 and looked_at["near_repeated"] > 300


@pytest.mark.slow
@pytest.mark.parametrize("similarity", [0.6, 0.8, 1.0])
def test_similar_texts_are_found_among_many_and_forgotten_in_their_order(similarity: float) -> None:
    """Texts of 202 words of which so many runs are those of an earlier one, clearly above and below the bound."""
    drawn, before = random.Random(7), SimilarTextsBefore(similarity, remembered=500)
    texts = [words(drawn, 202) for _ in range(400)]
    assert not any(before.look(" ".join(one)) for one in texts)

    def changed(one: list[str], common: float) -> str:
        kept = round(2 * common * 200 / (1 + common)) + 2  # runs in both, of 200: Jaccard kept / (400 - kept)
        return " ".join(one[:kept] + words(drawn, 202 - kept))

    near = [before.look(changed(one, min(1.0, similarity + 0.15))) for one in texts[:100]]
    far = [before.look(changed(one, similarity - 0.25)) for one in texts[100:200]]
    assert sum(near) >= 98 and sum(far) <= 1
    assert all(before.look(" ".join(one)) for one in texts[:100])
    fresh = [before.look(" ".join(words(drawn, 202))) for _ in range(500)]
    assert not any(fresh) and not before.look(" ".join(texts[0])), "500 others came after it"
    assert not before.look("?!") and not before.look("?!")


@pytest.mark.parametrize(
    "text",
    [
        "Yes, sure.",
        "3.14159 2.71828 1.41421",
        "1. Apple\n2. Banana\n3. Cherry",
        "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(add(i, i))\n",
        '{"name": "Anna", "age": 31, "city": "Berlin"}',
        "Anna Schmidt, Berlin",
        "",
    ],
)
def test_a_text_whose_language_cannot_be_told_is_not_in_a_wrong_one(text: str) -> None:
    assert is_in_other_language(text, ["fi"]) is None
    gates = QualityGates(GateBounds(wrong_language=0.1, languages=("fi",), least_rows=20))
    assert not trips(gates, [row(number, text) for number in range(200)])
    marked, looked_at = gates.counted([row(number, text) for number in range(200)])
    assert marked == {"wrong_language": 0} and looked_at["wrong_language"] > 20


def test_languages_that_are_close_are_not_told_apart_where_both_are_likely() -> None:
    text = "Ovo je rečenica koja je napisana na jeziku koji se govori."
    assert is_in_other_language(text, ["hr"]) is not True and is_in_other_language(text, ["en"])


def test_a_language_that_nobody_tells_is_refused_at_once() -> None:
    with pytest.raises(BadCondition, match=r"expected languages of af, .*, zu, ace, .*; found 'gr'"):
        QualityGates(GateBounds(wrong_language=0.5, languages=("en", "gr")))


def test_a_batch_counts_of_how_many_rows_a_gate_knows() -> None:
    rules = (Rule("slow", "seconds > 60", 0.5),)
    gates = QualityGates(GateBounds(invalid=0.9, wrong_language=0.9, languages=("en",), repeated=0.9, rules=rules))
    rows = [row(number, ENGLISH.format(number)) for number in range(62)]
    rows += [row(62, None, error="schema_invalid"), row(63, None, error="timeout")]
    assert not trips(gates, rows)
    marked, looked_at = gates.counted(rows)
    assert marked == {"invalid": 1, "repeated": 0, "wrong_language": 0, "slow": 0}
    assert looked_at["invalid"] == 63 and looked_at["slow"] == 64 and looked_at["repeated"] == 62
    assert 5 <= looked_at["wrong_language"] <= 30
    assert gates.counted([row(1000)]) == ({}, {})


def test_outputs_that_miss_their_schema_have_a_gate_of_their_own() -> None:
    gates = QualityGates(GateBounds(invalid=0.5))
    assert not trips(gates, [row(number, None, error="timeout") for number in range(400)])
    ((_, trip),) = trips(gates, [row(number, None, error="schema_invalid") for number in range(400)])
    assert trip.gate == "invalid"


def test_what_a_gate_cannot_judge_counts_neither_way() -> None:
    gates = QualityGates(GateBounds(empty=0.5, cut=0.5))
    call = AnswerParts(tool_calls=(ToolCall("id", "function", "look", "{}"),))
    assert not trips(gates, [row(number, "", parts=call) for number in range(400)])
    assert not trips(gates, [row(number, (0.1, 0.2), "length") for number in range(400)])  # type: ignore[arg-type]
    assert not trips(QualityGates(GateBounds(cut=0.5), max_tokens=8), [row(n, "no", "length") for n in range(400)])


def test_a_gate_that_is_off_or_has_tripped_says_no_more() -> None:
    bad = [row(number, "", "length") for number in range(1000)]
    assert not trips(QualityGates(GateBounds()), bad)
    assert [trip.gate for _, trip in trips(QualityGates(GateBounds(empty=0.5, cut=0.5)), bad)] == ["empty", "cut"]


def test_rules_look_at_the_outcome_and_at_the_fields_of_its_json() -> None:
    rules = (Rule("low", "score < 3", 0.2), Rule("slow", "seconds > 60 AND finish_reason = 'stop'", 0.2))
    gates = QualityGates(GateBounds(rules=rules), json_schema=SCHEMA)
    good = [row(number, f'{{"score": {3 + number % 3}, "label": "a"}}') for number in range(640)]
    assert not trips(gates, good)
    broken = [row(number, text) for number, text in enumerate(["no json", '{"score": "x"}', None] * 100)]
    assert not trips(gates, broken)
    found = trips(gates, [row(number, '{"score": 1, "label": "b"}') for number in range(640)])
    assert [trip.gate for _, trip in found] == ["low"]
    assert "meet its condition" in found[0][1].describe() and "score" not in found[0][1].describe()


def test_rules_pause_a_run_of_few_rows() -> None:
    """As every other gate: 30 rows are fewer than rules look at together later on."""
    gates = QualityGates(GateBounds(empty=0.1, rules=(Rule("same", "output = ''", 0.1),), least_rows=20))
    found = {trip.gate: number for number, trip in trips(gates, [row(number, "") for number in range(30)])}
    assert found["empty"] == 20 and 20 <= found["same"] <= 22


@pytest.mark.parametrize("before", [0, 7, 1_000])
def test_a_batch_has_the_rates_of_rules_whose_rows_came_just_now(before: int) -> None:
    gates = QualityGates(GateBounds(rules=(Rule("low", "score < 3", 0.9),)), json_schema=SCHEMA)
    assert not trips(gates, [row(number, '{"score": 5}') for number in range(before)])
    rows = [row(before + number, f'{{"score": {number}}}') for number in range(10)]
    assert not trips(gates, rows)
    assert gates.counted(rows) == ({"low": 3}, {"low": 10})
    assert gates.counted([*rows, row(5_000, '{"score": 1}')]) == ({"low": 3}, {"low": 10})  # one that never came


def test_a_value_that_a_rule_cannot_take_hides_no_other_row_from_it() -> None:
    rules = (Rule("low", "CAST(output AS BIGINT) < 3", 0.2),)
    gates = QualityGates(GateBounds(rules=rules))
    rows = [row(number, "none" if number % 50 == 0 else "1") for number in range(640)]
    assert [trip.gate for _, trip in trips(gates, rows)] == ["low"]
    marked, looked_at = gates.counted(rows)
    assert marked == looked_at == {"low": 640 - 13}


def test_a_rule_that_cannot_be_evaluated_is_refused_at_once() -> None:
    with pytest.raises(BadCondition, match="no column is called 'scroe'"):
        QualityGates(GateBounds(rules=(Rule("low", "scroe < 3", 0.2),)), json_schema=SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "I'm sorry, but I can't help with that.",
        "I’m really sorry, but I cannot assist with this request.",
        "Sorry, I am unable to provide that.",
        "I cannot create content of this kind.",
        "As an AI language model, I do not have opinions.",
        "I must respectfully decline.",
        "Es tut mir leid, aber ich kann dabei nicht helfen.",
        "Je suis désolé, mais je ne peux pas répondre à cette demande.",
        "Lo siento, pero no puedo ayudar con eso.",
        "Mi dispiace, ma non posso aiutarti.",
        "Desculpe, mas não posso ajudar com isso.",
        "抱歉，我无法回答这个问题。",
        "申し訳ありませんが、そのご質問にはお答えできません。",
    ],
)
def test_refusals_are_known_by_how_they_begin(text: str) -> None:
    assert is_refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I can't believe it is already winter, said the fox.",
        "Sorry is the hardest word.",
        "The assistant said: I'm sorry, but I can't help with that.",
        "I'm sorry to hear about your loss.",
        "As an engineer I would begin with the drawings.",
        "Leider regnet es heute.",
        "Lo siento mucho por tu perro.",
    ],
)
def test_other_texts_are_no_refusals(text: str) -> None:
    assert not is_refusal(text)


def test_phrases_of_ones_own_count_too() -> None:
    assert is_refusal("  NO COMMENT on this.", ["no comment"]) and not is_refusal("I have no comment", ["no comment"])


def test_bad_rows_of_a_batch_are_counted_by_their_gates() -> None:
    refused = [row(1, "I'm sorry, but I can't help with that."), row(2, "", parts=AnswerParts(refusal="no"))]
    rows = [*refused, row(3, "", "length"), row(4, None), row(5)]
    assert marked_rows(rows) == {"empty": 2, "cut": 1, "refused": 2}
    assert marked_rows([row(1), row(2)]) == {}
    assert marked_rows([row(1, "No comment."), row(2)], ["no comment"]) == {"refused": 1}
