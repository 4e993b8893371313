"""What filters and gates see of a text: its words, a signature of them, and its language. The packages of the extra
`filters` are imported here."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import numpy as np

from resources.store.row_condition import BadCondition

PERMUTATIONS = 128  # of a signature
_SEED = 1
# Chinese, Japanese and Korean write no spaces between words: there each character is one.
_CHARACTERS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Of sentences the three likeliest languages have 0.97 to 1 together, of code, lists and numbers 0.05 to 0.55. Three,
# because close ones share a text: Croatian, Bosnian and Serbian.
_LIKELIEST, _TOLD, _NOT_EXCLUDED = 3, 0.7, 0.05
_NO_LANGUAGE = "zxx"


def words_of(text: str) -> list[str]:
    """Words in lower case, without signs; the same ones whatever the form of Unicode (NFKC)."""
    found: list[str] = _words().findall(unicodedata.normalize("NFKC", text).lower())
    return found


@cache
def _words() -> re.Pattern[str]:
    """Vowel signs and accents that are characters of their own, as in Hindi, Tamil and Arabic, do not end a word. In
    Thai, Lao, Burmese and Khmer, which write no spaces between words, they do: else a sentence would be one word."""
    unspaced = {*range(0xE00, 0xF00), *range(0x1000, 0x10A0), *range(0x1780, 0x1800)}
    signs = (chr(code) for code in range(0x300, 0x3040) if code not in unspaced)
    marks = "".join(sign for sign in signs if unicodedata.category(sign).startswith("M"))
    letters = rf"[^\W{_CHARACTERS}]"
    return re.compile(rf"[{_CHARACTERS}]|{letters}+(?:[{marks}]+{letters}*)*")


def runs_of(words: Sequence[str], length: int) -> list[str]:
    """Each run of so many words; all of them where they are fewer."""
    last = max(len(words) - length, 0)
    return [" ".join(words[first : first + length]) for first in range(last + 1)]


def signatures(token_sets: list[list[str]]) -> Any:
    """MinHash signatures (Broder, 1997) of sets of tokens: an array of 32-bit numbers, a line a set. Raises
    BadCondition."""
    matrix = _minhash().digest_matrix_from_token_sets(token_sets, num_perm=PERMUTATIONS, seed=_SEED)
    return np.array(matrix.to_rows(), np.uint32)


def signature(tokens: list[str]) -> Any:
    """That of one set, in less time. Raises BadCondition."""
    made = _minhash()(num_perm=PERMUTATIONS, seed=_SEED)
    made.update(tokens)
    return np.array(made.digest(), np.uint32)


def _minhash() -> Any:
    try:
        from rensa import RMinHash
    except ImportError:
        raise BadCondition(needs("rensa")) from None
    return RMinHash


def similarities(one: Any, other: Any) -> Any:
    """What sets have in common, of all that they have: Jaccard similarities of the lines of two arrays of signatures,
    as np.uint8. Eight bits of each hash are compared ("b-bit minwise hashing", Li and König, 2010): the error is 0.04.
    """
    return ((one == other).mean(axis=1) - 1 / 256) / (1 - 1 / 256)


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
