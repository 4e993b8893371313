"""What filters and gates see of a text: its words and its language. Of the extra `filters`, packages are imported
here."""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache
from typing import Any

from resources.store.row_condition import BadCondition

# Chinese, Japanese and Korean write no spaces between words: there each character is one.
_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
# Of sentences the three likeliest languages have 0.97 to 1 together, of code, lists and numbers 0.05 to 0.55. Three,
# because close ones share a text: Croatian, Bosnian and Serbian.
_LIKELIEST, _TOLD, _NOT_EXCLUDED = 3, 0.7, 0.05
_NO_LANGUAGE = "zxx"


def words_of(text: str) -> list[str]:
    """Words in lower case, without signs."""
    return _WORDS.findall(text.lower())


def needs(package: str) -> str:
    """What to do where a package of the extra is not there."""
    return f"expected the package {package}, found none; `pip install 'batch-assets[filters]'` brings it"


def language_of(text: str) -> str:
    """The likeliest language by py3langid, ISO 639-1 where there is such a code. Raises BadCondition."""
    return str(_identifier().classify(text)[0])


def is_in_other_language(text: str, allowed: Collection[str]) -> bool | None:
    """Whether a text is in none of these languages; None where nobody can tell. Raises BadCondition."""
    found = _identifier().rank(text)
    if found[0][0] in allowed:
        return False
    if found[0][0] == _NO_LANGUAGE or sum(chance for _, chance in found[:_LIKELIEST]) < _TOLD:
        return None
    return None if sum(chance for name, chance in found if name in allowed) >= _NOT_EXCLUDED else True


def check_languages(languages: Collection[str]) -> None:
    """Raises BadCondition for a language that is not told from others."""
    known = _identifier().labels
    if unknown := [code for code in languages if code not in known]:
        codes = ", ".join(sorted(known, key=lambda code: (len(code), code)))
        raise BadCondition(f"expected languages of {codes}; found {unknown[0][:80]!r}")


@cache
def _identifier() -> Any:
    """Half a second of CPU, once in a process."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        raise BadCondition(needs("py3langid")) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
