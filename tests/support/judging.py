"""A judge behind a URL that scores texts by a rule."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kapelle.environments.grading.judge import FULL

Rule = Callable[[str], int]
"""Text → its score, from 0 to 10."""


def verdict(messages: Sequence[Mapping[str, str]], rule: Rule) -> str:
    """Return the reply of a judge that gives every criterion the score of the text, and every text its own."""
    system, asked = (message["content"] for message in messages)
    [seal] = set(re.findall(r"VERDICT ([0-9a-f]{16}): ", system))
    names = re.findall(rf"(\w+)=<0-{FULL}>", system)
    texts = [json.loads(each) for each in re.findall(rf'<text(?:-\d+)? {seal}>\n(".*")\n', asked)]
    scores = [rule(text) for text in (texts if texts[1:] else texts * len(names))]
    return f"So.\nVERDICT {seal}: " + " ".join(
        f"{name}={score}" for name, score in zip(names, scores, strict=True)
    )


class JudgingServer(http.server.ThreadingHTTPServer):
    """Counts what it was asked."""

    daemon_threads = True

    def __init__(self, rule: Rule) -> None:
        super().__init__(("127.0.0.1", 0), _Replies)
        self.rule = rule
        self.asked = 0

    @property
    def settings(self) -> dict[str, object]:
        """The judge as a recipe names it."""
        return {"endpoint": f"http://127.0.0.1:{self.server_port}/v1", "model": "rule"}


class _Replies(http.server.BaseHTTPRequestHandler):
    server: JudgingServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked += 1
        self.say({"choices": [{"message": {"content": verdict(body["messages"], self.server.rule)}}]})

    def do_GET(self) -> None:
        self.say({"data": []})

    def say(self, said: object) -> None:
        told = json.dumps(said).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def judging(rule: Rule) -> Iterator[JudgingServer]:
    """Serve while the block runs."""
    with JudgingServer(rule) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
