"""Exercises as files: one source, four builds; and submissions, graded one by one or a folder at a time.

    source.py       an exercise's source (py:percent) as cells with a role
    build.py        the student's and the solution's notebook, and the tree of all builds
    nbgrader.py     a source assignment for nbgrader
    otter.py        a master notebook for otter, and tests for courses that use pytest alone
    submission.py   what a student handed in, as text: never run here
    seal.py         the same text in place of a submission's cells, so that nbgrader's and otter's kernels never run them
    grade.py        a folder of submissions: a CSV of scores, the diagnoses counted
    command.py      `fsdp-ref exercises build | check | grade`

The verdicts are `fsdp_ref.lab.checks`'. This part must never run a submission in its own process, nor put a solution into what is released.
"""
