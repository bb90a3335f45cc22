"""The question bank: questions as JSON, answers judged in Python, numbers computed by named formulas.

    from fsdp_ref.quizzes import bank, judge
    question = bank.question("05.q3", learner="ada")
    judge(question, "b")                                # right or not, and what the answer given teaches

The format is jupyterquiz's (multiple_choice, many_choice, numeric, string) with more keys, and one more type, `order`; question.py has
them all. This part must never evaluate text from a question file, import the lab, or show an answer before it was asked for.
"""

from .bank import Bank, question, quiz
from .judging import Verdict, judge
from .question import Question

__all__ = ["Bank", "Question", "Verdict", "judge", "question", "quiz"]
