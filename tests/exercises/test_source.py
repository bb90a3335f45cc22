"""The source of an exercise: what a cell's role is, what is cut out, what is refused."""

import pytest

from fsdp_ref.errors import ConfigError
from fsdp_ref.exercises import source

GOOD = '''# %% [markdown]
# # Twice a number

# %%
import torch

# %%
def twice(x):
    """Twice x."""
    if x:
        # BEGIN SOLUTION
        return x + x
        # END SOLUTION
    # BEGIN SOLUTION
    return 0
    # END SOLUTION

# %% tags=["check"]
check("twice", twice)

# %% tags=["check-hidden"]
secret("twice", twice)
'''


def written(folder, text, name="twice.py"):
    path = folder / name
    path.write_text(text)
    return path


def test_cells_have_the_roles_their_text_gives_them(tmp_path):
    found = source.read(written(tmp_path, GOOD))
    assert [cell.role for cell in found.cells] == ["text", "code", "answer", "check", "hidden"]
    assert (found.id, found.title, found.function) == ("twice", "Twice a number", "twice")
    assert found.solution_lines() == ["return x + x", "return 0"]
    assert found.hidden_lines() == ['secret("twice", twice)']


def test_each_solution_becomes_a_stub_where_it_stood(tmp_path):
    answer = source.read(written(tmp_path, GOOD)).cells[2].text
    assert source.with_stub(answer).splitlines() == [
        "def twice(x):", '    """Twice x."""', "    if x:", "        # YOUR CODE HERE", "        raise NotImplementedError()",
        "    # YOUR CODE HERE", "    raise NotImplementedError()"]
    assert "SOLUTION" not in source.without_marks(answer) and "return x + x" in source.without_marks(answer)


@pytest.mark.parametrize("change, words", [
    (lambda text: text.replace("# # Twice", "# Twice"), "does not begin with a heading"),
    (lambda text: text.replace("    # END SOLUTION\n\n# %% tags", "\n# %% tags"), "do not pair up"),
    (lambda text: "\n".join(line for line in text.splitlines() if "SOLUTION" not in line), "has no answer cell"),
    (lambda text: text.replace("        # BEGIN SOLUTION", "        ### BEGIN SOLUTION"), "do not pair up|is no mark"),
    (lambda text: text.replace("return 0", "return 0  # SOLUTION"), "is no mark"),
    (lambda text: text.replace('tags=["check"]', ""), "has no check cell"),
    (lambda text: text.replace('check("twice", twice)', 'check("twice")'), "does not hand in one function"),
    (lambda text: text.replace('check("twice", twice)', 'check("thrice", twice)'), "does not hand in one function"),
    (lambda text: text.replace("# %% tags=[\"check\"]", "# %%\n# BEGIN SOLUTION\n3\n# END SOLUTION\n\n# %% tags=[\"check\"]")
        .replace("# %%\n# BEGIN", "# %%\n1\n\n# %%\n# BEGIN"), "another cell stands between"),
])
def test_a_source_that_would_be_built_wrong_is_refused(tmp_path, change, words):
    changed = change(GOOD)
    assert changed != GOOD
    with pytest.raises(ConfigError, match=words):
        source.read(written(tmp_path, changed))


def test_a_bad_name_and_an_empty_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no name for an exercise"):
        source.read(written(tmp_path, GOOD, "Twice-1.py"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no exercise source"):
        source.read_all(tmp_path / "empty")
