"""A process that compiles one constraint after the other, so that the replica learns whether it ends.

Owns that process. Knows nothing of the cache or of requests. The one decision: compilers of schemas and expressions
have inputs on which they do not end (intersections of expressions, products of divisors); nothing inside a thread can
stop them, so they run where the kernel can. An alarm ends this process even where the replica is gone.

One line of JSON a message: first the tokenizer, then constraints; the answers are `{"fault": TEXT}`, where an empty
text is none.
"""

import json
import resource
import signal
import sys

from llguidance import LLTokenizer

from pipeline.serving.grammar.response_format import Constraint
from pipeline.serving.grammar.structured_matcher import CompiledGrammar, GrammarFault

MAX_BYTES = 4 * 2**30
"""Of address space; 0.1 GiB is usual."""


def main() -> None:
    """Serve until the pipe closes."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    given = json.loads(sys.stdin.readline())
    tokens = LLTokenizer(given["tokenizer"], n_vocab=given["num_tokens"], eos_token=given["ends"])
    _answer({"fault": ""})
    for line in sys.stdin:
        asked = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, asked["alarm_seconds"])  # its default action needs no interpreter
        constraint = Constraint(kind=asked["kind"], text=asked["text"], field="")
        try:
            CompiledGrammar(constraint, tokens=tokens)
            fault = ""
        except GrammarFault as error:
            fault = str(error) or "it cannot be compiled"
        signal.setitimer(signal.ITIMER_REAL, 0)
        _answer({"fault": fault})


def _answer(body: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
