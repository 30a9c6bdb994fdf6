"""From a constraint in a body to a grammar that the engine follows.

Owns the order (limits, cache, trial, compile), its deadlines and its refusals. Knows nothing of the engine. The one
decision: nothing is compiled on the engine's thread or the server's, a constraint is first compiled where it can be
stopped, and what was found, good or bad, is kept, so the same bomb explodes once.
"""

import asyncio
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from pipeline.serving.grammar.response_format import Constraint
from pipeline.serving.grammar.structured_limits import why_too_large
from pipeline.serving.grammar.structured_matcher import CompiledGrammar, GrammarFault
from pipeline.serving.grammar.structured_trial import CompilerUnavailable, TooCostly, Trial
from pipeline.serving.grammar.vocabulary import Vocabulary
from pipeline.serving.json_body import Rejected

DEADLINE_SECONDS = 2.0
WAIT_SECONDS = 10.0
"""For the compiler, behind the constraints of others."""
MAX_KEPT = 64
_Key = tuple[str, str]


class GrammarCompiler:
    """Compiles constraints for one vocabulary, one at a time; for any thread."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        max_kept: int = MAX_KEPT,
    ) -> None:
        self._vocabulary = vocabulary
        self._trial = Trial(vocabulary, deadline_seconds=deadline_seconds)
        self._wait_seconds = wait_seconds
        self._max_kept = max_kept
        self._kept: OrderedDict[_Key, CompiledGrammar | str] = OrderedDict()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    async def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar.

        Raises:
            GrammarFault: the constraint is wrong, too large, too costly, or not for this model's tokenizer.
            CompilerUnavailable: others' constraints keep the compiler busy, or it does not start.
        """
        found = self._looked_up(constraint)
        if found is not None:
            return found
        try:
            work = asyncio.get_running_loop().run_in_executor(self._worker, self._compiled, constraint)
        except RuntimeError as error:
            raise CompilerUnavailable("this model is no longer served") from error
        try:
            return await asyncio.wait_for(work, self._wait_seconds)
        except TimeoutError as error:
            raise CompilerUnavailable(f"other grammars are compiled for {self._wait_seconds:g} s already") from error

    async def answer(self, constraint: Constraint) -> CompiledGrammar:
        """As `compile`, for a body.

        Raises:
            Rejected: 400 where the constraint is at fault, 503 where the compiler is not to be had.
        """
        try:
            return await self.compile(constraint)
        except GrammarFault as fault:
            raise Rejected(f"{constraint.field}: {fault}", param=constraint.field) from fault
        except CompilerUnavailable as state:
            raise Rejected(f"{constraint.field}: {state}; try again", status=503, param=constraint.field) from state

    def close(self) -> None:
        """Compile nothing more, and end the compiling process."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._trial.close()

    def _looked_up(self, constraint: Constraint) -> CompiledGrammar | None:
        """What is known already, without compiling."""
        if self._vocabulary.grammar_tokens is None:
            raise GrammarFault(self._vocabulary.why_no_grammar)
        too_large = why_too_large(constraint)
        if too_large is not None:
            raise GrammarFault(too_large)
        key = (constraint.kind, constraint.text)
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if isinstance(found, str):
            raise GrammarFault(found)
        return found

    def _compiled(self, constraint: Constraint) -> CompiledGrammar:
        found = self._looked_up(constraint)  # another request may have asked for the same meanwhile
        if found is not None:
            return found
        tokens = self._vocabulary.grammar_tokens
        assert tokens is not None
        try:
            self._trial.judge(constraint)
            made = CompiledGrammar(constraint, tokens=tokens)
        except GrammarFault as fault:
            self._keep(constraint, str(fault))
            if isinstance(fault, TooCostly):  # so that the next constraint does not wait for a new process
                self._worker.submit(self._trial.started)
            raise
        self._keep(constraint, made)
        return made

    def _keep(self, constraint: Constraint, found: CompiledGrammar | str) -> None:
        with self._lock:
            self._kept[constraint.kind, constraint.text] = found
            while len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
