"""Asks engines how many tokens texts have (`POST /tokenize`, as vLLM has it): over-long ones are refused early.

Bounded in calls, bytes and seconds. Whatever keeps an engine from answering decides nothing: its refusal becomes the
line's error when the line is asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp
import orjson

from batch_assets.api.batches.lines import LineError, too_long
from batch_assets.api.batches.long_texts import LongText
from batch_assets.api.execution.engines.engine_supply import ServingEngine
from gpu_runner.bounded_http.bounded_read import BodyTooLarge, UnaskedEncoding, read_body
from gpu_runner.bounded_http.tls_files import TlsFilesError, ssl_of

log = logging.getLogger(__name__)

ALL_SECONDS, CALL_SECONDS = 20.0, 5.0
ANSWER_BYTES = 32 << 20  # it lists the tokens, too
SURE_AFTER = 16  # answers, before those that are likely short enough are not asked about
MARGIN = 1.5
MOST_ENGINES = 3
CHAT_SLACK = 256  # an engine may render a chat in another way when it answers: what is near the limit is left to it
REFUSALS = (400, 413, 422)  # of one text, whatever the engine minds about it


class _NotThere(Exception):
    """The engine has no `/tokenize`, or cannot answer now."""


async def too_long_texts(engines: Sequence[ServingEngine], texts: Sequence[LongText], context: int) -> list[LineError]:
    """Texts that have more tokens than an engine takes, and more than `context`, in the order of their lines.

    `texts`: longest first. The rest is left out once even the densest text so far would fit with their bytes. The first
    of MOST_ENGINES engines that counts one is asked for all. It takes ALL_SECONDS at most, whatever they do.
    """
    until = asyncio.get_running_loop().time() + ALL_SECONDS
    for engine in engines[:MOST_ENGINES]:
        if (errors := await _too_long(engine, texts, context, until)) is not None:
            return sorted(errors, key=lambda error: error.line or 0)
    return []


async def _too_long(
    engine: ServingEngine, texts: Sequence[LongText], context: int, until: float
) -> list[LineError] | None:
    """None: this engine counts nothing. `until`: by the loop's clock."""
    errors: list[LineError] = []
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if engine.api_key:
        headers["Authorization"] = f"Bearer {engine.api_key}"
    densest, asked = 0.0, 0
    try:
        async with (
            asyncio.timeout_at(until),
            aiohttp.ClientSession(headers=headers, auto_decompress=False) as session,
        ):
            for text in texts:
                if asked >= SURE_AFTER and text.size * densest * MARGIN < context:
                    break
                found = await _count(session, engine, text)
                if found is None:
                    continue
                count, most = found
                asked, densest = asked + 1, max(densest, count / text.size)
                most = max(most, context)
                if count > most + (CHAT_SLACK if text.param == "body.messages" else 0):
                    errors.append(too_long(most, count, text.param, text.line))
    except (aiohttp.ClientError, TimeoutError, OSError, TlsFilesError, _NotThere) as error:
        log.info("prompts are not counted to the end: %s", type(error).__name__)
    return errors if asked else None


async def _count(session: aiohttp.ClientSession, engine: ServingEngine, text: LongText) -> tuple[int, int] | None:
    """Tokens of a text, and the most that the engine takes; None: it does not say that of this one.

    Raises _NotThere for an engine that says it of none.
    """
    url = f"{engine.endpoint.rstrip('/').removesuffix('/v1')}/tokenize"
    async with (
        asyncio.timeout(CALL_SECONDS),
        session.post(url, data=text.request, allow_redirects=False, ssl=ssl_of(engine.tls)) as answer,
    ):
        if answer.status in REFUSALS:
            return None
        if answer.status != 200:
            raise _NotThere
        try:
            said = orjson.loads(await read_body(answer, ANSWER_BYTES))
            count, most = said["count"], said["max_model_len"]
        except BodyTooLarge:
            return None
        except (ValueError, LookupError, TypeError, UnaskedEncoding):
            raise _NotThere from None
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number > 0 for number in (count, most))
    return (count, most) if whole else None
