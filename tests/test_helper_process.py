"""Helper processes: they answer, and their end is one sentence."""

from __future__ import annotations

import pytest

from capsnet.errors import UserError
from capsnet.helper_process import Helper

ECHO = "from capsnet.helper_process import serve; serve(lambda request: exit(3) if request['stop'] else request)"


def test_a_helper_answers_each_request_and_its_end_is_one_sentence() -> None:
    helper = Helper("echo", ECHO, advice="try again")
    try:
        assert helper.ask(stop=False, text="û") == {"stop": False, "text": "û"}
        for _ in range(2):
            with pytest.raises(UserError, match=r"the process 'echo' stopped with exit code 3, .*: try again"):
                helper.ask(stop=True)
    finally:
        helper.close()
