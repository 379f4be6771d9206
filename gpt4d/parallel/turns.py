"""Coroutines that take turns, one for each chunk of a microbatch (ATP paper, §4.1).

Layers and blocks are coroutines that give their turn away, ``await Turn()``, between the start of a collective and the
first use of its result, so that the other chunks compute meanwhile. No torch here: the planner runs layers on
symbolic tensors in the same turns.
"""

from collections.abc import Coroutine, Generator, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


class Turn:
    """``await Turn()`` lets the other chunks run up to the same place."""

    def __await__(self) -> Generator[None, None, None]:
        yield


def run(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run one coroutine for each chunk, in turns, and return their results. The turns are the same on all ranks."""
    chunks = list(coroutines)
    if len(chunks) == 1:
        return [run_alone(chunks[0])]
    results: dict[int, Result] = {}
    try:
        while len(results) < len(chunks):
            for index, chunk in enumerate(chunks):
                if index not in results:
                    try:
                        chunk.send(None)
                    except StopIteration as finished:
                        results[index] = finished.value
    finally:
        for chunk in chunks:
            chunk.close()
    return [results[index] for index in range(len(chunks))]


def run_alone(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run the coroutine of a microbatch that is not cut."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as finished:
        return finished.value
