"""Numbers in sentences and tables."""

import pytest

from coterie_deploy.terminal.tables import figure


@pytest.mark.parametrize(
    ("value", "digits", "said"),
    [(110.96, 3, "111"), (1234.2, 4, "1234"), (1.0, 3, "1.00"), (0.5, 4, "0.5000"), (123456.0, 3, "1.23e+05"), (float("nan"), 3, "-")],
)
def test_a_figure_keeps_its_digits_and_never_ends_in_a_point(value: float, digits: int, said: str) -> None:
    assert figure(value, digits) == said
