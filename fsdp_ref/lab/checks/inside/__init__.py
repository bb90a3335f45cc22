"""What runs in the processes of a submission: the server that forks them, their limits, the only line to the judge, and one harness an
exercise (a module with the exercise's id and a function `run(function, case, rank) -> evidence`).

[Note: two packages in one] The server is started as a script and imports this folder as a package of its own, `inside`, so that a process
that runs a submission never holds a judge, a hidden case or a reference solution in memory. Nothing here may import `fsdp_ref.lab`, and a
harness must never hold what the learner is asked for.
"""
