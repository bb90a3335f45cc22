"""Harness: calls the answer once with this rank's part of the whole, and sends back what it returned."""


def run(function, case, rank):
    """The evidence: what the answer returned."""
    return {"result": function(case["mine"], rank.rank, rank.world, rank.wire.put, rank.wire.take)}
