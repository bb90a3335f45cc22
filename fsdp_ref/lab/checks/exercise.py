"""What an exercise is to the grader: cases, a judge, points and hints. It must never hold code of the answer as text that is shown."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field

from .observe import Evidence
from .report import Verdict

PROPERTIES = ("values", "sharding", "lifetime", "order", "bytes", "no hang")


@dataclass(frozen=True)
class Case:
    """One run on fresh ranks.

    Attributes:
        world: the number of ranks.
        title: what is special about it, for the report ("3 ranks, 7 elements").
        shared: what every rank's harness gets (None, numbers, text, lists, dicts, tensors).
        each: what rank r's harness gets besides, one dict a rank.
        known: what only the judge gets (expected results).
        files: name -> bytes, laid into the ranks' folder before they start.
        one_folder: whether all ranks share one folder (else each has its own).
        limit, cpu: seconds of time (longer on a busy machine), and of CPU time of each rank.
        memory, file_size: bytes a rank may take, and bytes of one file.
    """

    world: int
    title: str
    shared: dict = field(default_factory=dict)
    each: list[dict] = field(default_factory=list)
    known: dict = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    one_folder: bool = False
    limit: float = 6.0
    cpu: int = 3
    memory: int = 2**29
    file_size: int = 2**26


@dataclass(frozen=True)
class Exercise:
    """One exercise.

    Attributes:
        id: its name, that of its modules and of its source.
        notebook: the lesson it belongs to, two digits.
        title, task: what it is called; what to write, in a few sentences.
        signature: the first line of the function, as the learner writes it.
        points: property -> points, in the order in which they are judged and told. "values" must be among them: without right values
            nothing else counts.
        hints: three, from a nudge to nearly everything.
        cases: seed -> the cases. A generator may look at the evidence of the case it gave last: `evidence = yield Case(...)`.
        judge: (case, evidence) -> verdicts. A pure function; called only when every rank returned.
        stops: kind of failure (observe.Failure) -> the property it counts against, where that is not the usual one.
    """

    id: str
    notebook: str
    title: str
    task: str
    signature: str
    points: dict[str, int]
    hints: tuple[str, str, str]
    cases: Callable[[int], Iterable[Case] | Generator[Case, Evidence, None]]
    judge: Callable[[Case, Evidence], list[Verdict]]
    stops: dict[str, str] = field(default_factory=dict)

    @property
    def function(self) -> str:
        """The name of the function to write."""
        return self.signature.removeprefix("def ").split("(")[0].strip()

    @property
    def link(self) -> str:
        """Where the student's notebook is, seen from the lesson."""
        return f"../exercises/release/{self.id}.ipynb"
