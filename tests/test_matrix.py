"""docs/failure-modes.md and the README's rows of it are what the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

import matrix


def test_the_page_and_the_readme_have_what_the_tests_say() -> None:
    found = matrix.rows()
    readme = matrix.README.read_text(encoding="utf-8")
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.page(found), "run: python tests/matrix.py --write"
    assert readme == matrix.updated(readme, matrix.excerpt(found)), "run: python tests/matrix.py --write"


def test_a_marked_test_without_both_halves_of_a_docstring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text('@pytest.mark.failure_mode\ndef test_a():\n    """Only one half."""\n')
    with pytest.raises(ValueError, match="test_a"):
        matrix.rows(tmp_path)


def test_rows_come_from_marked_tests_and_marked_files(tmp_path: Path) -> None:
    (tmp_path / "test_b.py").write_text(
        '@pytest.mark.failure_mode\ndef test_one():\n    """a | b\n    goes on\n\n    why\n    not"""\ndef test_two(): ...\n'
    )
    (tmp_path / "test_a.py").write_text(
        'pytestmark = [pytest.mark.failure_mode]\ndef helper(): ...\nasync def test_three():\n    """c\n\n    d"""\n'
    )
    assert matrix.rows(tmp_path) == [
        matrix.Row("c", "d", "test_three", "test_a.py"),
        matrix.Row("a \\| b goes on", "why not", "test_one", "test_b.py"),
    ]


def test_the_readme_around_the_matrix_stays_as_it_is() -> None:
    readme = f"before\n{matrix.BEGIN}\nold\n{matrix.END}\nafter\n"
    once = matrix.updated(readme, "new\n")
    assert once == f"before\n{matrix.BEGIN}\n\nnew\n\n{matrix.END}\nafter\n"
    assert matrix.updated(once, "new\n") == once
    with pytest.raises(ValueError, match="no place"):
        matrix.updated("no markers", "new\n")
