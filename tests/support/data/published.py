"""Writes the published graphs of this folder from the files of their authors.

The graphs are four of those that Kusumoto et al. solved (A Graph Theoretic Framework of Recomputation Algorithms for
Memory-Efficient Backpropagation, NeurIPS 2019, arXiv 1905.11722), from the repository pfnet-research/recompute, commit
f82d00f, where they are called ``computational_graphs/cg_*.txt``. What is written is what planning needs: bytes of the
values that operations make, and what each operation and its backward read and make, exactly what the authors' files
say. Parameters and the network's inputs are left out; their gradients are not, because the authors' figures have them
alive until the end. Operations are in the authors' order: a depth-first topological one.

    python tests/support/data/published.py <authors' file> <name of the graph> > tests/data/<name>.txt

Format: lines that begin with ``#`` are remarks. Then one line per operation of the forward program: its type, and
after that five lists separated by ``|``, each of them integers separated by spaces: the values that it reads; the bytes
of the values that it makes, which are numbered from 0 on in this order; the values that its backward reads; the values
whose gradients its backward makes or adds to; the bytes of the gradients of parameters and network inputs that its
backward makes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

HEADER = """\
# {name}: from pfnet-research/recompute, commit f82d00f (Kusumoto et al., arXiv 1905.11722); see published.py
# type|reads|bytes made|backward reads|gradients made|bytes of other gradients made
"""


@dataclass
class Call:
    reads: list[tuple[int, str]]
    makes: list[int]
    kind: str


def parse(text: str) -> tuple[list[int], list[Call], list[Call]]:
    """Bytes of the variables, the calls of forward, and those of backward."""
    lines = iter(text.splitlines())
    variables, _ = map(int, next(lines).split())
    sizes = [int(next(lines).split(" ", 2)[1]) for _ in range(variables)]
    calls: dict[str, list[Call]] = {"forward": [], "backward": []}
    for block in lines:
        reads, makes = map(int, next(lines).split())
        read = [next(lines).split(" ", 1) for _ in range(reads)]
        made = [int(next(lines)) for _ in range(makes)]
        calls[block].append(Call([(int(number), what) for number, what in read], made, next(lines)))
        next(lines)
    return sizes, calls["forward"], calls["backward"]


def ordered(variables: int, calls: list[Call]) -> list[int]:
    """The calls in the reverse post-order of a depth-first walk over the variables by number."""
    following: dict[int, list[int]] = {}
    for call in calls:
        for number, _ in call.reads:
            following.setdefault(number, []).extend(call.makes)
    seen: set[int] = set()
    finished: list[int] = []
    for root in range(variables):
        if root in seen:
            continue
        seen.add(root)
        walk = [(root, iter(following.get(root, ())))]
        while walk:
            number, rest = walk[-1]
            fresh = next((other for other in rest if other not in seen), None)
            if fresh is None:
                finished.append(number)
                walk.pop()
            else:
                seen.add(fresh)
                walk.append((fresh, iter(following.get(fresh, ()))))
    makers = {call.makes[0]: index for index, call in enumerate(calls)}
    return [makers[number] for number in reversed(finished) if number in makers]


def write(text: str, name: str) -> str:
    """The compact form of one of the authors' files."""
    sizes, forward, backward = parse(text)
    numbers: dict[int, int] = {}
    seen: set[int] = set()
    lines = []
    for index in ordered(len(sizes), forward):
        call, back = forward[index], backward[index]
        reads = [numbers[number] for number, _ in call.reads if number in numbers]
        numbers.update((number, len(numbers) + place) for place, number in enumerate(call.makes))
        again = [numbers[number] for number, what in back.reads if what != "gradient" and number in numbers]
        gradients = [numbers[number] for number in back.makes if number in numbers]
        made = [sizes[number] for number in call.makes]
        others = [sizes[number] for number in back.makes if number not in numbers and number not in seen]
        seen.update(back.makes)
        parts = (dict.fromkeys(reads), made, dict.fromkeys(again), dict.fromkeys(gradients), others)
        lines.append("|".join([call.kind, *(" ".join(map(str, part)) for part in parts)]))
    return HEADER.format(name=name) + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(write(Path(sys.argv[1]).read_text(), sys.argv[2]))
