"""Episodes that want to act, hide or break: they are text, in a real browser that counts what runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser
from tests.support.episode_lines import write_steps
from tests.support.viewed_runs import write_run

from kapelle.services.binding import Binding
from kapelle.services.http import HttpServer
from kapelle.viewer.library import Library
from kapelle.viewer.server import viewer

CALL = "window.__ran=(window.__ran||0)+1"
MARKUP = [
    f"<script>{CALL}</script>",
    f"</script><script>{CALL}</script>",
    f"</pre></details></main><script>{CALL}</script>",
    f"<img src=x onerror='{CALL}'>",
    f"<svg onload='{CALL}'><script>{CALL}</script></svg>",
    f"<svg><animate onbegin='{CALL}' attributeName=x dur=1s>",
    f"<a href='javascript:{CALL}'>click</a>",
    f"javascript:{CALL}",
    f'"><script>{CALL}</script>',
    f"' autofocus onfocus='{CALL}' x='",
    f"<iframe srcdoc='<script>parent.{CALL}</script>'></iframe>",
    "<iframe src='https://evil.example/'></iframe>",
    f"<body onload='{CALL}'>",
    "<style>@import 'https://evil.example/x.css'; body { display: none }</style>",
    "<link rel=stylesheet href=https://evil.example/x.css>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<base href='https://evil.example/'>",
    f"<math><mtext></mtext><script>{CALL}</script></math>",
    f"<template><script>{CALL}</script></template>",
    f"<form action=https://evil.example/><button autofocus formaction='javascript:{CALL}'>x</button></form>",
    f"<details open ontoggle='{CALL}'>",
    f"<video><source onerror='{CALL}'></video>",
    f"<input autofocus onfocus='{CALL}'>",
    f"<object data='javascript:{CALL}'></object>",
    f"<embed src='data:text/html,<script>{CALL}</script>'>",
    "{{ 7*7 }} {% for x in (1,) %}{{ self.__init__.__globals__ }}{% endfor %}",
    "${7*7} #{7*7} <%= 7*7 %>",
    f"<!--><script>{CALL}</script>-->",
    f"<![CDATA[><script>{CALL}</script>]]>",
    f"&lt;script&gt;{CALL}&lt;/script&gt;",
]
TRICKS = [
    "\x1b[31mred\x1b[0m\x1b]8;;javascript:alert(1)\x07link\x1b]8;;\x07",
    "\u202eevil\u202c \u2066x\u2069",
    "\x00NUL\x00",
    "a\ud800b",
    "\ufeff\u200b\u200d",
    "Z\u0335\u0321\u0322" * 200,
    "\u2028\u2029",
    "𐏿\U000e0041\U0010ffff",
    "\r\n" * 50,
    "",
]
PLACES = ("task", "question", "agent", "text", "new_messages", "info", "error", "answer", "metric", "piece")
HOSTILE = 200


def row(number: int, text: str, place: str) -> dict[str, Any]:
    """Return an episode with a hostile text in one place."""

    def at(name: str, usual: str) -> str:
        return text if place == name else usual

    said = {
        "agent": at("agent", "solver"), "policy": "p", "version": 1, "weights_hash": "h", "index": 0, "completed_before": 0,
        "prompt_ids": [1, 2], "completion_ids": [1, 2], "logprobs": [-0.1, -0.2], "finish_reason": "stop",
        "text": at("text", "x"), "new_messages": [{"role": "user", "content": at("new_messages", "q"), "speaker": at("new_messages", "s")}],
        "reward": 0.0, "score": None, "parent": None, "continuation_return": None, "trained": True,
    }  # fmt: skip
    return {
        "step": 1, "group": number // 8, "task": {"id": at("task", "t"), "question": at("question", "q"), "data": {text: text}, "part": ""},
        "seed": 1, "agents": [at("agent", "solver")], "turns": [said], "branches": [said | {"index": 1, "parent": 0}],
        "rewards": {at("agent", "solver"): 1.0}, "success": 1.0, "info": {at("info", "i"): at("info", "v"), "final": at("answer", "a")},
        "truncated": False, "error": at("error", "") or None,
    }  # fmt: skip


def lines() -> Iterator[bytes]:
    texts = MARKUP + TRICKS
    for number in range(HOSTILE - 6):
        text, place = texts[number % len(texts)], PLACES[(number // len(texts) + number) % len(PLACES)]
        yield json.dumps(row(number, text, place)).encode()
    large = row(194, "x", "text") | {"branches": []}
    large["turns"][0]["text"] = MARKUP[0] * 220_000  # more than 10 MB
    yield json.dumps(large).encode()
    yield b'{"turns": [{"agent": "' + bytes(range(128, 256)) + b'", "text": "\xff\xfe\xc0"}]}'
    yield b"\x00" * 100
    yield b"[" * 50_000
    yield b'{"task": 1e999, "success": NaN, "rewards": {"a": -Infinity}, "turns": [[], 3, null, {}]}'
    yield json.dumps(row(199, "half", "text")).encode()[:-30]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("hostile")
    run = write_run(folder / "<img src=x onerror=alert(1)>", steps=1)
    write_steps(run / "episodes" / "train", {1: [line + b"\n" for line in lines()]})
    trace = [
        {
            "format": 1,
            "line": n,
            "turns": [{"index": 0, "pieces": [text, text], "advantage": [1e308, "x"]}],
            "vocabulary": {"1": text},
        }
        for n, text in enumerate(MARKUP)
    ]
    traces = [json.dumps(each).encode() + b"\n" for each in trace] + [b'{"half\n']
    write_steps(run / "traces", {1: traces})
    # A verdict whose evidence names the policies, and distributions of theirs.
    entropy = [{"step": k, **{f"entropy/{text}": float(k) for text in MARKUP}} for k in range(2, 14)]
    rows = [{"step": 1, **{f"reward/{text}": 1.0 for text in MARKUP}}, *entropy]
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"step": 14, "su')
    spread = {"step": 1, **{f"reward/{text}": [0, 0, [1, 2]] for text in MARKUP}, MARKUP[0]: MARKUP}
    (run / "distributions.jsonl").write_text(json.dumps(spread) + "\n")
    (run / "provenance.json").write_text(json.dumps({"optimizer.lr": MARKUP[0]}))
    with HttpServer(Binding(), viewer(Library([folder]), Binding())) as server:
        yield server.url


def key(url: str) -> str:
    with httpx.Client(base_url=url, timeout=120.0) as web:
        return web.get("/").text.split('href="/run/')[1].split('"')[0]


@pytest.mark.slow
def test_hostile_episodes_are_escaped(hostile: str) -> None:
    run = key(hostile)
    found = {}
    with httpx.Client(base_url=hostile, timeout=120.0) as web:
        for line in [*range(0, 194, 48), 194, 195, 196, 197, 198, 199]:
            answer = web.get(f"/run/{run}/episode/train/1/{line}")
            found[line] = answer.status_code
            assert CALL not in answer.text.replace("&lt;script&gt;", "").split("<main")[0]
            for bad in (
                "<script>window",
                "<img src=x",
                "<svg onload",
                "<iframe",
                "<base",
                "<meta http",
                "onerror='w",
            ):
                assert bad not in answer.text, line
            assert len(answer.text) < 2_000_000
    assert {line for line, status in found.items() if status != 200} == {196, 197, 199}


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="package")
async def test_no_hostile_script_runs_in_a_browser(hostile: str, browser: Browser) -> None:
    """All pages are opened, every fold unfolded, every token touched: no script runs, no report of the policy, no call outside."""
    run = key(hostile)
    context = await browser.new_context(base_url=hostile)
    context.set_default_timeout(120_000)
    await context.add_init_script(
        "window.__reports = 0; document.addEventListener('securitypolicyviolation', () => { window.__reports += 1; });"
    )
    page = await context.new_page()
    outside: list[str] = []
    wrong: list[str] = []
    page.on(
        "request",
        lambda request: outside.append(request.url) if not request.url.startswith(hostile) else None,
    )
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    paths = [
        "",
        "/episodes",
        "/team",
        "/settings?all=1",
        "/league",
        "/together?" + "&".join(f"e=train.1.{n}" for n in range(8)),
    ]
    shown = [f"/episode/train/1/{line}" for line in (*range(0, 194, 65), 194, 195, 198)]
    counted = {"ran": 0, "reports": 0, "pages": 0}
    for path in ["/", *(f"/run/{run}{each}" for each in [*paths, *shown])]:
        await page.goto(path)
        await page.evaluate("document.querySelectorAll('details').forEach((fold) => { fold.open = true; })")
        await page.evaluate(
            "document.querySelectorAll('.t').forEach((token) => { token.dispatchEvent(new PointerEvent('pointerover', {bubbles: true})); })"
        )
        ran, reports = await page.evaluate("[window.__ran || 0, window.__reports]")
        counted = {
            "ran": counted["ran"] + ran,
            "reports": counted["reports"] + reports,
            "pages": counted["pages"] + 1,
        }
    await context.close()
    assert counted == {"ran": 0, "reports": 0, "pages": 1 + len(paths) + len(shown)}
    assert outside == []
    assert wrong == []
