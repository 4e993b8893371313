"""Deterministic outputs: the same model, prompt and seed always give the same text, length or vector.

One output token is one word. Randomness is a SHAKE-256 stream keyed by the request, so no state is shared
between requests and a longer `max_tokens` continues the same text.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from dataclasses import dataclass

# 256 words: one byte of the stream picks one.
_WORD_LIST = """
able about above across action active actual adult advice after again agree ahead allow almost alone along already
also always amount angle animal answer apple apply area argue around arrive autumn average aware basic beach beauty
because become before begin behind believe below benefit better between beyond board book border both bottom branch
bread break bridge brief bright bring broad brother build burn business button calm camera careful carry castle catch
cause center certain chain chair change chapter charge cheap check choice circle city claim class clean clear climb
clock close cloud coast coffee cold collect color common compare complete concern connect consider contain corner
correct cotton count country couple courage course cover create cross crowd current custom daily dance danger dark
daughter decade decide deep degree deliver demand depend desert design detail develop differ dinner direct discover
distance divide doctor double doubt dream dress drive during early earth easy edge effect effort eight either element
empty energy engine enjoy enough enter entire equal even evening event every exact example except expect explain
express extra fact fair family famous farm fast father favor feature feel fence festival field figure final find
finger finish first fish floor flower follow food force forest forget formal forward found fresh friend front fruit
future garden gather general gentle giant glass global gold gradual grain grand grass great green ground group grow
guard guess guide half hand happen harbor hard harvest hear heart heavy height help hidden high hill history hold home
honest hope horse hour house human hundred idea ideal
"""
WORDS = tuple(_WORD_LIST.split())


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long answers are, in tokens: `fixed:N`, `uniform:LOW:HIGH` or `lognormal:MEAN:CAP[:SIGMA]`."""

    kind: str
    first: float
    second: float = 0.0
    sigma: float = 0.8

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read the command line's form; raises ValueError that says what was expected."""
        kind, *parts = text.split(":")
        counts = {"fixed": (1,), "uniform": (2,), "lognormal": (2, 3)}
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        good = len(numbers) in counts.get(kind, ()) and all(number > 0 for number in numbers)
        if not good or (kind == "uniform" and numbers[0] > numbers[1]):
            raise ValueError(f"output tokens: expected fixed:N, uniform:LOW:HIGH or lognormal:MEAN:CAP, found {text!r}")
        return cls(kind, *numbers)

    def tokens(self, low: float, high: float) -> int:
        """The length for two uniform numbers in [0, 1): at least 1."""
        if self.kind == "fixed":
            return max(1, int(self.first))
        if self.kind == "uniform":
            return int(self.first + low * (self.second - self.first + 1))
        normal = math.sqrt(-2 * math.log(1 - low)) * math.cos(math.tau * high)
        mean = math.log(self.first) - self.sigma**2 / 2
        return max(1, min(int(self.second), round(math.exp(mean + self.sigma * normal))))


def prompt_digest(prompt: bytes) -> str:
    """Sha256 (hex) by which the request log names a prompt."""
    return hashlib.sha256(prompt).hexdigest()


def request_key(model: str, prompt: str, seed: int | None) -> bytes:
    """What all randomness of a request grows from. `prompt` is its digest."""
    return hashlib.sha256(f"{model}\0{prompt}\0{seed}".encode()).digest()


def natural_length(key: bytes, lengths: Lengths) -> int:
    """Tokens that this request would like to answer with, its end token included."""
    scale = 2.0**32
    return lengths.tokens(int.from_bytes(key[:4], "big") / scale, int.from_bytes(key[4:8], "big") / scale)


def words(key: bytes, count: int) -> str:
    """`count` words. The first `n` words are the same for every count >= n."""
    return " ".join([WORDS[byte] for byte in hashlib.shake_256(key).digest(count)])


def unit_vector(key: bytes, dimensions: int) -> list[float]:
    """A vector of length 1 (in double precision)."""
    values = array("i", hashlib.shake_256(key).digest(4 * dimensions))
    norm = math.sqrt(sum([value * value for value in values]))
    return [value / norm for value in values]


def count_tokens(text: str) -> int:
    """Tokens of a text: one per four characters, the usual rule of thumb for English."""
    return (len(text) + 3) // 4
