"""Helper processes: one line of JSON asks, one line of JSON answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any, cast

from capsnet.errors import UserError


class Helper:
    """A process that runs `code`, which ends in `serve`, and answers requests one after another.

    It ends with its parent, even if that is killed.
    """

    def __init__(self, name: str, code: str, *words: str, advice: str, env: Mapping[str, str] = os.environ) -> None:
        self.name, self.advice = name, advice
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(env),
            start_new_session=True,  # the parent handles Ctrl-C and ends its helpers
        )  # fmt: skip
        self.requests = cast(IO[str], self.process.stdin)
        self.answers = cast(IO[str], self.process.stdout)

    def ask(self, **request: Any) -> Any:
        with suppress(BrokenPipeError):  # it has ended: there is no answer either
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
        line = self.answers.readline()
        if not line:
            why = f"stopped with exit code {self.process.wait()}, possibly out of memory"
            raise UserError(f"the process '{self.name}' {why}: {self.advice}.")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()  # it has no state to save, and may be in the middle of a request
        self.process.wait()
        for pipe in (self.requests, self.answers):
            with suppress(BrokenPipeError):  # an unsent request
                pipe.close()


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """The loop inside a helper, until its parent ends."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
