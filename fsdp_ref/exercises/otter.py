"""A master notebook for otter: `otter assign` makes the student's version and the autograder of it.

One property of the exercise is one hidden test case with points of its own. The tests are functions (otter's other format reads
expected outputs from saved ones). This module must never write a solution mark that otter overlooks: it looks for `# BEGIN SOLUTION` alone.
"""

from __future__ import annotations

from .cells import GRADED_IMPORT, Graded, as_text, code, graded_line, markdown, notebook, raw
from .source import BEGIN, END, STUB, Source

# No name: with one, otter grades no notebook but those it made itself. No PDF (it needs LaTeX) and no cells of otter's own: the check is
# the exercise's. Seal puts the submission's text in place of its cells before they are executed, so that the code itself runs only in
# ranks of its own.
CONFIG = """\
# ASSIGNMENT CONFIG
init_cell: false
check_all_cell: false
export_cell: false
files: []
generate:
  pdf: false
  plugins:
    - fsdp_ref.exercises.seal_otter.Seal:
        exercise: {id}
        function: {function}
tests:
  files: false
  ok_format: false"""


def build(source: Source, checks: list[Graded]) -> dict[str, str]:
    """Path below the folder of the build -> text."""
    cells = [raw(CONFIG.format(id=source.id, function=source.function))]
    roles = [cell.role for cell in source.cells]
    first, last = roles.index("answer"), len(roles) - 1 - roles[::-1].index("answer")
    for number, cell in enumerate(source.cells):
        if number == first:
            cells += [raw(f"# BEGIN QUESTION\nname: {source.id}\npoints:\n" + "\n".join(f"  - {graded.points}" for graded in checks)),
                      raw("# BEGIN SOLUTION")]
        if cell.role != "hidden":
            cells.append(markdown(cell.text) if cell.role == "text" else code(_with_prompt(cell.text)))
        if number == last:
            cells += [raw("# END SOLUTION"), raw("# BEGIN TESTS"), *(code(_test(source, graded)) for graded in checks),
                      raw("# END TESTS"), raw("# END QUESTION")]
    return {f"{source.id}/{source.id}.ipynb": as_text(notebook(source, cells))}


def _test(source: Source, graded: Graded) -> str:
    """One hidden test case; otter hands the submission's function in by the argument's name."""
    name = f"test_{graded.property.replace(' ', '_')}"
    return "\n".join(['""" # BEGIN TEST CONFIG', f"points: {graded.points}", "hidden: true", '""" # END TEST CONFIG',
                      f"def {name}({source.function}):", f"    {GRADED_IMPORT}", f"    {graded_line(source, graded)}"])


def _with_prompt(text: str) -> str:
    """The cell with otter's own words for the stub: a prompt after each solution."""
    lines = []
    for line in text.splitlines():
        indent = line[:len(line) - len(line.lstrip())]
        if line.strip() == BEGIN:
            lines.append(line + " NO PROMPT")
        elif line.strip() == END:
            lines += [line, f'{indent}""" # BEGIN PROMPT', *(indent + stub for stub in STUB), f'{indent}"""; # END PROMPT']
        else:
            lines.append(line)
    return "\n".join(lines)
