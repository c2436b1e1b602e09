"""Program that renders chat templates, apart from the run: its processor time and memory are bounded by the system.

A template is a program that comes with a model. The transformers library runs it in a sandbox, which bounds neither.
A line of JSON comes in for each conversation, and one goes out. Nothing of this project is imported here.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from string import ascii_letters
from typing import Any

PROCESSOR_S = 10
"""Processor time of one conversation [s]."""
MEMORY_BYTES = 2 << 30
"""Address space of the program [byte]; Python and the library take a quarter of it."""
MOST_CHARACTERS = 4 << 20
"""Characters of all texts that one line asks for."""
MOST_REASON = 200
"""Longest reason of a template, which may be of any length [characters]."""
MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""Begin of a template's mark around what the model itself writes."""
_DATED = (
    "{% macro strftime_now(format) %}{% set written = namespace(text=format) %}{% for name, value in "
    "collapipe_date.items() %}{% set written.text = written.text.replace(name, value) %}{% endfor %}"
    "{{ written.text }}{% endmacro %}\n"
)
"""Macro in front of a template: it stands for the library's function of today's date, which no variable replaces."""


def make_renderer(
    template: str, variables: Mapping[str, Any], day: str
) -> Callable[[Sequence[Mapping[str, Any]]], list[Any]]:
    """Return a function that renders conversations.

    Parameters
    ----------
    template : in Jinja
    variables : names that it may read beside the messages, such as ``bos_token``
    day : date that the template writes for today's, such as 2026-01-31

    Returns
    -------
    A function of jobs, each with its ``messages`` and whether the answer's beginning follows them (``prompt``). It
    gives the text of each, and the places of what the template marks as the model's own, from and to; or one text
    alone, the reason why there is none.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    has_marks = bool(MARKED.search(template))
    directives = [f"%{flag}{letter}" for flag in ("", "-") for letter in ascii_letters]
    written_date = {name: date.fromisoformat(day).strftime(name) for name in directives}

    def render(jobs: Sequence[Mapping[str, Any]]) -> list[Any]:
        rendered: list[Any] = []
        size = 0
        for job in jobs:
            try:
                texts, spans = render_jinja_template(
                    conversations=[job["messages"]],
                    chat_template=_DATED + template,
                    add_generation_prompt=job["prompt"],
                    return_assistant_tokens_mask=has_marks,
                    collapipe_date=written_date,
                    **variables,
                )
                size += len(texts[0]) + (len(spans[0]) if spans else 0)
                if size > MOST_CHARACTERS:
                    raise ValueError(f"texts of {size} characters, expected at most {MOST_CHARACTERS}")
            except MemoryError:
                return [f"more than {MEMORY_BYTES >> 20} MiB of memory"]
            except Exception as error:  # a template may raise anything
                return [(str(error).strip().splitlines() or [type(error).__name__])[0][:MOST_REASON]]
            rendered.append([texts[0], spans[0] if spans else []])
        return rendered

    return render


def main() -> None:
    """Read the template and its variables, and then render one line of jobs after the other."""
    import resource

    first = json.loads(sys.stdin.readline())
    render = make_renderer(**first)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for line in sys.stdin:
        bound_s = int(time.process_time()) + PROCESSOR_S
        resource.setrlimit(resource.RLIMIT_CPU, (bound_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        print(json.dumps(render(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
