"""What the bank says a rank prints is what a real rank prints."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist

import fsdp_ref
from tests.quiz.support import QUESTIONS

PRINTING = [question for question in QUESTIONS if question.prints]


def run(rank, world, code):
    """What this rank prints when the cell runs in a rank of the lab."""
    names = {"rank": rank, "world_size": world, "torch": torch, "dist": dist,
             **{name: getattr(fsdp_ref, name) for name in ("fully_shard", "data_parallel", "DDP", "ZERO1", "ZERO2", "ZERO3")}}
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "<question>", "exec"), names)
    return out.getvalue().strip()


@pytest.mark.parametrize("question", PRINTING, ids=lambda question: question.id)
def test_a_rank_prints_what_the_right_answer_says(question, ranks):
    printed = ranks(question.prints["ranks"], run, question.code)[question.prints["rank"]]
    assert [answer.text for answer in question.answers if answer.correct] == [printed]


def test_the_question_says_how_many_ranks_and_which():
    words = {2: "two", 3: "three", 4: "4"}
    for question in PRINTING:
        assert f"rank {question.prints['rank']}" in question.text and words[question.prints["ranks"]] in question.text.lower()
