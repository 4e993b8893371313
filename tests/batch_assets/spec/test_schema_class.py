"""`output.json_schema` as the import path of a pydantic class."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from batch_assets.component import spec_version
from batch_assets.dataset_loading import load_datasets
from batch_assets.from_python.python_spec import dataset_spec
from batch_assets.spec.discovery import COMPONENT, declarations, known_datasets
from batch_assets.spec.models import GeneratedDatasetSpec, SpecError, load_spec
from resources.yaml_files import dump


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]


class Mood(enum.Enum):
    NO = "no"
    YES = "yes"


class Pet(BaseModel):
    """One animal."""

    animal: Annotated[Cat | Dog, Field(discriminator="kind")]
    mood: Mood | None = None


MODULE = """
from collections.abc import Callable
from pydantic import BaseModel
class Answer(BaseModel):
    text: str
    score: float
class Outer:
    class Inner(Answer):
        pass
    class Odd(BaseModel):
        one: Callable[[], int]
here = 1
"""
PATH = "answers_of_a_test:Answer"


def attributes(schema: Any, **others: Any) -> dict[str, Any]:
    return {
        "name": "pets",
        "source": {"grid": {"q": ["a", "no"]}},
        "prompt": {"user": "{{ q }}"},
        "model": "m",
        "output": {"json_schema": schema},
        **others,
    }


def spec(schema: Any) -> GeneratedDatasetSpec:
    return load_spec(attributes(schema), "defs.yaml")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "answers_of_a_test.py"
    file.write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "answers_of_a_test", raising=False)
    return file


def test_a_class_is_its_schema_and_not_its_path(module: Path):
    named, schema = spec(PATH), sys.modules["answers_of_a_test"].Answer.model_json_schema()
    assert named == spec(schema)
    assert spec_version(named) == spec_version(spec(schema)) != spec_version(spec(Pet))
    assert spec("answers_of_a_test:Outer.Inner").output.json_schema == {**schema, "title": "Inner"}
    assert named.generation().json_schema == schema


def test_a_class_itself_may_be_given_from_python_with_tagged_unions_and_enums():
    made = dataset_spec("pets", {"grid": {"q": ["a"]}}, "{{ q }}", "m", output={"json_schema": Pet, "columns": True})
    assert made.output.json_schema == Pet.model_json_schema()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("answers_of_a_test", "expected a JSON schema, or the import path of a pydantic class"),
        ("answers_of_a_test:Answer()", "as my_package.models:Answer, found 'answers_of_a_test:Answer()'"),
        ("antigravity:fly", "found antigravity, a module of Python itself"),
        ("/etc/passwd:Answer", "found '/etc/passwd:Answer'"),
        ("a" * 10_000 + ":B", "expected a JSON schema, or the import path"),
        ("not_there_at_all.models:Answer", "found no module 'not_there_at_all'. Install its package"),
        ("answers_of_a_test.sub:Answer", "found no module 'answers_of_a_test.sub'"),
        ("answers_of_a_test:Anser", "found no 'Anser' in it. Did you mean 'Answer'?"),
        ("answers_of_a_test:here", "found answers_of_a_test:here, which is no class"),
        ("answers_of_a_test:Outer", "found answers_of_a_test:Outer, which is another class"),
        ("answers_of_a_test:Outer.Odd", "which has none: PydanticInvalidForJsonSchema"),
        ("pydantic:BaseModel", "which has none: AttributeError"),
    ],
)
def test_what_is_no_class_with_a_schema_is_one_error_that_names_it(module: Path, path: str, said: str):
    with pytest.raises(SpecError) as caught:
        spec(path)
    (found,) = caught.value.problems
    assert str(found).startswith("output.json_schema: ") and said in str(found)
    assert len(str(found)) < 600


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('no \\x1b[31m')", "an error at its import: RuntimeError"),
        ("raise SystemExit(3)", "an error at its import: SystemExit: 3"),
        ("import not_there_either", "found no module 'not_there_either'. answers_of_a_test imports it."),
        ("def f(:", "an error at its import: SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_breaks_its_own_file_alone(module: Path, text: str, said: str):
    module.write_text(text)
    with pytest.raises(SpecError) as caught:
        spec(PATH)
    assert said in str(caught.value) and "\x1b" not in str(caught.value)
    assert spec({"type": "object"})


def test_a_dataset_goes_on_with_the_last_schema_when_its_module_is_broken(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    defs, home = tmp_path / "defs", tmp_path / "home"
    (defs / "pets").mkdir(parents=True)
    home.mkdir()
    monkeypatch.setenv("BATCH_ASSETS_DEFS", str(defs))
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    others = {"sampling": {"temperature": "{{ 1 }}", "extra": {"logit_bias": {"5": 1}}}, "deadline": "6h", "samples": 2}
    file = defs / "pets" / "defs.yaml"
    file.write_text(dump({"type": COMPONENT, "attributes": attributes(PATH, **others)}))
    before = declarations().datasets["pets"][0]
    assert not load_datasets().broken
    module.write_text("raise RuntimeError")
    monkeypatch.delitem(sys.modules, "answers_of_a_test")
    file.touch()  # else it is not read again
    assert [one.name for one in load_datasets().broken] == ["pets"]
    assert known_datasets()["pets"][0] == before
