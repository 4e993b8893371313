"""Specs, and files that people write: defs.yaml, fleet.yaml, price lists."""

from __future__ import annotations

from hostile.case import cases

BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{k: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 30))
TEXTS = [
    ("an alias bomb", BOMB, "values"),
    ("an alias bomb of mappings", MERGE_BOMB, "values"),
    ("an alias of itself", "a: &a [*a]\n", "within itself"),
    ("an alias of itself, deeper", "a: &a {b: {c: [*a]}}\n", "within itself"),
    ("an alias of nothing", "a: *nope\n", "alias"),
    ("600,000 values", "a: [" + "1," * 600_000 + "1]\n", "values"),
    ("500 levels of lists", "a: " + "[" * 500 + "]" * 500 + "\n", "levels"),
    ("500 levels of mappings", "".join(" " * i + "a:\n" for i in range(500)), "levels"),
    ("100,000 open lists", "a: " + "[" * 100_000, "levels"),
    ("a Python object", "a: !!python/object/apply:os.system ['true']\n", "that means nothing here"),
    ("a Python name", "a: !!python/name:os.system\n", "that means nothing here"),
    ("an include", "a: !include /etc/hostname\n", "that means nothing here"),
    ("a 13th month", "a: 2024-13-45\n", "expected"),
    ("an integer of 5,000 digits", "a: " + "9" * 5000 + "\n", "int"),
    ("base64 that is none", "a: !!binary '#'\n", None),
    ("an int tag on text", "a: !!int x\n", "int"),
    ("a float tag on text", "a: !!float x\n", "float"),
    ("a bool tag on text", "a: !!bool x\n", "bool"),
    ("a list as a key", "? [a, b]\n: 1\n", "key"),
    ("a mapping as a key", "{{a: b}: 1}\n", "key"),
    ("a tab", "a:\n\t- b\n", "YAML"),
    ("a null byte", "a: 'x\x00y'\n", "YAML"),
    ("an open quote", "a: 'x\n", "YAML"),
    ("an open list", "a: [\n", "YAML"),
    ("two anchors in a row", "a: &x &y 1\n", "YAML"),
    ("a wrong directive", "%YAML 9.9\n---\na: 1\n", "YAML"),
    ("a merge of text", "<<: x\n", "merg"),
    ("bytes that are no UTF-8", b"a: \xff\xfe\xff\n", "UTF-8"),
    ("UTF-16", "a: 1\n".encode("utf-16"), "UTF-8"),
    ("a zip file", b"PK\x03\x04" + bytes(range(256)), "UTF-8"),
    ("17 MiB", b"# " + b"x" * (17 << 20), "bytes"),
]
DEFS = [
    *cases("defs", *[(name, text, words or "type: expected") for name, text, words in TEXTS]),
    *cases(
        "defs",
        ("a pipe", "pipe", "a pipe or a device"),
        ("a folder", "folder", "a folder"),
        (
            "two documents that are wrong",
            "type: batch_assets.GeneratedDataset\nattributes: []\n---\nx: 1\n",
            "expected",
        ),
    ),
]
# What takes the longest is read by one of the three; they share their reader.
QUICK = [one for one in TEXTS if one[0] not in ("600,000 values", "17 MiB", "100,000 open lists")]
FLEETS = [
    *cases("fleet", *[(name, text, words or "known key") for name, text, words in QUICK]),
    *cases(
        "fleet",
        ("two documents", "idle_minutes: 1\n---\nidle_minutes: 2\n", "one document"),
        ("a list", "- a\n", "found list"),
        ("text", "hello\n", "hello"),
        ("a number", "3\n", "found 3"),
        ("idle nan", "idle_minutes: .nan\n", "idle_minutes"),
        ("idle infinite", "idle_minutes: .inf\n", "idle_minutes"),
        ("a negative number of instances", "max_instances: -1\n", "max_instances"),
        ("instances without an end", "max_instances: 1e400\n", "max_instances"),
        ("a price that is nan", "local: [{gpu: L4, gpu_memory_gib: 24, price_per_hour: .nan}]\n", "price_per_hour"),
        (
            "a price that is infinite",
            "local: [{gpu: L4, gpu_memory_gib: 24, price_per_hour: .inf}]\n",
            "price_per_hour",
        ),
        *[
            (f"an engine at {url}", f"engines: [{{name: a, kind: endpoint, url: '{url}'}}]\n", "url")
            for url in (
                "http://127.0.0.1:abc",
                "http://127.0.0.1:99999",
                "http://[::1",
                "ftp://x",
                "http://",
                "x",
                "http://u:secret@x",
                "file:///etc/hostname",
                "http://a b/",
                "http://x:0",
            )
        ],
        ("an engine called -x", "engines: [{name: -x, kind: simulated}]\n", "name"),
        ("a model called -x", "engines: [{name: a, kind: simulated, models: ['--config=x']}]\n", "models"),
        *[
            (
                f"a price of cached tokens of {price}",
                f"engines: [{{name: a, kind: endpoint, url: 'http://a', usd_per_million_tokens: "
                f"{{input: 1, output: 1, cached: {price}}}}}]\n",
                "cached",
            )
            for price in (".nan", ".inf", "-1", "2", "[]", "free")
        ],
        (
            "an engine that loads code",
            "engines: [{name: a, kind: endpoint, url: 'http://a', engine: {trust_remote_code: true}}]\n",
            "loads no code",
        ),
        ("two engines of one name", "engines: [{name: a, kind: simulated}, {name: a, kind: simulated}]\n", "twice"),
    ),
]
PRICES = [
    *cases("prices", *[(name, text, words or "one key") for name, text, words in QUICK]),
    *cases(
        "prices",
        ("a price that is nan", "offers: [{provider: us, gpu: L4, price_per_hour: .nan}]\n", "price_per_hour"),
        ("a price that is infinite", "offers: [{provider: us, gpu: L4, price_per_hour: .inf}]\n", "price_per_hour"),
        ("offers without an end", "offers: &a [*a]\n", "within itself"),
    ),
]
BASE = {"name": "q", "source": {"path": "q.jsonl"}, "prompt": {"user": "{{ q }}"}, "model": "m"}
HUGE = 1 << 70
ENGINES: list[tuple[str, object, str]] = [
    *[(f"code by {key}", {key: True}, "loads no code") for key in ("trust_remote_code", "trust-remote-code")],
    ("a plug-in", {"reasoning_parser_plugin": "/tmp/x.py"}, "loads no code"),
    ("another argument", {"allowed_local_media_path": "/"}, "known key"),
    ("an API key", {"api_key": "x"}, "known key"),
    ("text", "--dtype=half", "mapping"),
    ("a list", ["--dtype=half"], "mapping"),
    (
        "a method that loads code",
        {"speculative_config": {"method": "custom_class", "num_speculative_tokens": 1}},
        "ngram",
    ),
    ("no method", {"speculative_config": {"num_speculative_tokens": 1}}, "a method or a model"),
    ("a draft model called -x", {"speculative_config": {"model": "-x", "num_speculative_tokens": 1}}, "engine.spec"),
    ("a word that is filled in", {"tokenizer": "/m/{port}"}, "no word in braces"),
    ("a template of two lines", {"chat_template": "a\n{{ b }}"}, "one line"),
    ("a template that does not end", {"chat_template": "{{ b"}, "Jinja"),
    ("a template too deep", {"chat_template": "{% if a %}" * 400}, "Jinja"),
    ("a template too long", {"chat_template": "{" * 5000}, "4096"),
    ("a template with NUL", {"chat_template": "{{ a }}\x00"}, "one line"),
    ("a template with a lone surrogate", {"chat_template": "{{ a }}\ud800"}, "engine.chat_template"),
    *[
        (f"an adapter {key} {value[:12]!r}", {"lora": {"name": "a", "path": "b", key: value}}, f"engine.lora.{key}")
        for key in ("name", "path")
        for value in ("--x", "a b", '{"name":1}', "a=b;id", "../x", "/a/../b", "a\n", "\ud800", "")
    ],
    ("adapters without an end", {"lora_modules": [{"name": f"a{i}", "path": "b"} for i in range(99)]}, "16"),
    ("adapters that are no list", {"lora_modules": {"a": "b"}}, "engine.lora_modules"),
    ("a cache of nothing", {"kv_cache_dtype": ""}, "engine.kv_cache_dtype"),
    ("pictures without an end", {"limit_mm_per_prompt": {"image": 1 << 70}}, "engine.limit_mm_per_prompt.image"),
    *[(f"rows {value!r}", {"max_num_seqs": value}, "max_num_seqs") for value in (0, -1, True, 1.5, "8", 1 << 70)],
    *[
        (f"{key} {value[:16]!r}", {key: value}, f"engine.{key}")
        for key in ("reasoning_parser", "tool_call_parser", "quantization", "tokenizer")
        for value in (
            "--x",
            "a b",
            "a;id",
            "$(id)",
            "`id`",
            "a\nb",
            "a\x00",
            "../x",
            "/a/../b",
            "x" * 300,
            "\ud800",
            "",
        )
    ],
]
SPECS = cases(
    "spec",
    *[(f"engine: {name}", {"engine": given}, words) for name, given, words in ENGINES],
    *[
        (f"model {name[:12]!r}", {"model": name}, "model")
        for name in (
            "-x",
            "--config=/etc/passwd",
            "--trust-remote-code",
            "a b",
            "a\nb",
            "a\x00b",
            "a\u2028b",
            "\ud800",
            "",
        )
    ],
    *[
        (f"{key} {value}", {"sampling": {key: value}}, f"sampling.{key}")
        for key in ("seed", "max_tokens", "min_tokens", "top_k")
        for value in (HUGE, -HUGE, 1 << 63, True, 1.5, "1")
    ],
    *[
        (f"{key} {value}", {"sampling": {key: value}}, f"sampling.{key}")
        for key in ("temperature", "top_p", "frequency_penalty")
        for value in (float("nan"), float("inf"), 1e400, True, "warm", 10**400)
    ],
    *[
        (f"limit {value}", {"source": {"path": "q", "limit": value}}, "source.limit")
        for value in (0, HUGE, 1 << 63, True)
    ],
    *[
        (f"budget {value}", {"budget_usd": value}, "budget_usd")
        for value in (float("nan"), float("inf"), 0, -1, 1e10, True)
    ],
    *[
        (f"deadline {text[:20]}", {"deadline": text}, "deadline")
        for text in (
            "0s",
            "-1h",
            "1e400h",
            "9" * 30 + "h",
            "1h" * 20_000,
            "2027-01-31T06:00:00",
            "0001-01-01T00:00:00+14:00",
            "2027-01-31T06:00:00 Nowhere/City",
            "* * * * * *",
            "99 * * * *",
            "nan",
            "",
        )
    ],
    *[
        (f"schedule {text[:20]}", {"schedule": text}, "schedule")
        for text in (
            "* * * *",
            "61 * * * *",
            "*/0 * * * *",
            "0 0 31 2 *",
            "9" * 5000 + " * * * *",
            "@never",
            "",
            "\x00 * * * *",
            "CRON_TZ=Nowhere/City 0 6 * * *",
        )
    ],
    *[
        (f"name {name[:12]!r}", {"name": name}, "name")
        for name in ("-x", "../x", "a/b", "A", "x" * 64, "", "a b", "a\n", "é", "~", ".", "%2e", "a;b", "$(x)")
    ],
    ("grid with an integer of 70 bits", {"source": {"grid": {"a": [HUGE]}}}, "source.grid.a.0"),
    ("grid with nan", {"source": {"grid": {"a": [float("nan")]}}}, "source.grid.a.0"),
    ("grid with a date", {"source": {"grid": {"a": [__import__("datetime").date(2024, 1, 1)]}}}, "Quote"),
    ("grid with bytes", {"source": {"grid": {"a": [b"x"]}}}, "source.grid.a.0"),
    ("grid with a list", {"source": {"grid": {"a": [[1]]}}}, "source.grid.a.0"),
    ("grid with half a character", {"source": {"grid": {"a": ["\ud800"]}}}, "source.grid.a.0"),
    ("extra with an integer of 70 bits", {"sampling": {"extra": {"a": HUGE}}}, "sampling.extra"),
    ("extra with nan", {"sampling": {"extra": {"a": [{"b": float("nan")}]}}}, "sampling.extra"),
    ("extra with a set", {"sampling": {"extra": {"a": {1, 2}}}}, "sampling.extra"),
    ("extra with the model", {"sampling": {"extra": {"model": "x"}}}, "sampling.extra"),
    ("a template kwarg with bytes", {"sampling": {"chat_template_kwargs": {"a": b"x"}}}, "chat_template_kwargs"),
    ("17 stops", {"sampling": {"stop": ["x"] * 17}}, "sampling.stop"),
    ("201 kept columns", {"keep_columns": [f"c{i}" for i in range(201)]}, "keep_columns"),
    (
        "weights without an end",
        {"hardware": {"model_facts": {"weights_gib": 1e300, "active_billions": 1, "kv_bytes_per_token": 1}}},
        "weights_gib",
    ),
    ("a negative price", {"hardware": {"max_price_per_hour": -1}}, "max_price_per_hour"),
    ("a reliability of 2", {"hardware": {"min_reliability": 2}}, "min_reliability"),
    ("a tag with a newline", {"tags": {"a": "b\nc"}}, "tags"),
    ("an owner that is none", {"owners": ["x y@z"]}, "owners.0"),
    ("a key of 100,000 letters", {"k" * 100_000: 1}, "known key"),
    ("text of 2 MB where a word is wanted", {"task": "x" * 2_000_000}, "task"),
    ("a list of a million where text is wanted", {"model": [0] * 1_000_000}, "model"),
    ("a template of 2 MB", {"prompt": {"user": "{{ q }}" + "x" * 2_000_000}}, "prompt.user"),
    (
        "a template that hangs without columns",
        {"prompt": {"system": "{{ 'a' | center(2000000000) }}", "user": "{{ q }}"}},
        "prompt.system",
    ),
)
FILES = [*DEFS, *FLEETS, *PRICES, *SPECS]
