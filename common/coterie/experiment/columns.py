"""Column types and dialects of tables: the parts of a `data` section that table sources share.

Only configuration; `coterie_client.data.tables.cells` reads the cells.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, StringConstraints, Tag, field_validator, model_validator

from coterie.experiment.settings import Settings
from coterie.text.names import normal

Name = Annotated[str, StringConstraints(min_length=1, max_length=1000), AfterValidator(normal)]

# How text tables write missing values, compared without surrounding spaces.
MISSING: Final = ("", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "<NA>", "#N/A", ".")
DELIMITERS: Final = (",", ";", "\t", "|")

Missing = Literal["refuse", "drop_rows", "mean", "indicator"]
Simple = Literal["number", "boolean", "date", "category", "ignore"]


def _level(value: object) -> object:
    """YAML reads 1 as a number, and yes as true. The number is accepted as a level's name; the boolean needs quotes."""
    if isinstance(value, bool):
        raise ValueError(f"a level is {value}, want text: write it in quotes, as it stands in the table")
    return str(value) if isinstance(value, int | float) else value


class Levels(Settings):
    """A category with declared levels. The first is the reference; each other one is a feature, 1 if the cell has this level."""

    #: The levels of the category. The first is the reference; each other one becomes a feature, 1 where the cell has this level.
    category: tuple[Annotated[Name, BeforeValidator(_level)], ...] = Field(min_length=2, max_length=10_000)

    @field_validator("category")
    @classmethod
    def _each_once(cls, levels: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(levels)) < len(levels):
            raise ValueError(f"the levels are {', '.join(levels)}, want each once")
        return levels


# Discriminated by its form, so that a misspelt word is one mistake instead of two.
_FORM = Discriminator(lambda value: "levels" if isinstance(value, Mapping | Levels) else "word")
ColumnType = Annotated[Annotated[Simple, Tag("word")] | Annotated[Levels, Tag("levels")], _FORM]


def _one_sign(text: str) -> str:
    if text in '\r\n"' or text.isalnum():
        raise ValueError(f"the sign is {text!r}, want one that is no letter, digit, quote or line end")
    return text


Sign = Annotated[str, StringConstraints(min_length=1, max_length=1), AfterValidator(_one_sign)]


class Dialect(Settings):
    """The format of a text table."""

    delimiter: Sign = ","  #: Sign between two cells.
    decimal: Literal[".", ","] = "."  #: Decimal sign of numbers.
    thousands: Literal[",", ".", "'", "\u2019", " ", "\u00a0", "\u202f"] | None = None  #: Sign between groups of three digits; null: none.
    #: Text encoding, such as utf-8, latin-1 or cp1252. A byte order mark is skipped.
    encoding: Annotated[str, StringConstraints(min_length=1, max_length=40)] = "utf-8"
    quote: Literal['"', "'"] | None = '"'  #: Sign around cells that contain the delimiter; null: quotes are ordinary characters.
    comment: Sign | None = None  #: Lines that begin with this sign are skipped.
    #: Cells that mean a missing value. Spaces around them do not count.
    missing: tuple[Annotated[str, StringConstraints(max_length=100)], ...] = MISSING
    names: tuple[Name, ...] | None = Field(default=None, min_length=1)  #: Names of the columns, for a file without a header.

    @field_validator("encoding")
    @classmethod
    def _is_a_text_encoding(cls, name: str) -> str:
        try:
            "".encode(name)
        except (LookupError, ValueError):
            raise ValueError(f"encoding is {name!r}, want a known one, such as utf-8, latin-1 or cp1252") from None
        return codecs.lookup(name).name

    @model_validator(mode="after")
    def _signs_differ(self) -> Dialect:
        signs = {"delimiter": self.delimiter, "decimal": self.decimal, "thousands": self.thousands, "comment": self.comment}
        signs["quote"] = self.quote
        # The delimiter may be the decimal or thousands sign, in tables that quote such cells.
        may_agree = ({"decimal", "delimiter"}, {"delimiter", "thousands"})
        for key, sign in signs.items():
            for other, again in signs.items():
                if key < other and sign is not None and sign == again and {key, other} not in may_agree:
                    raise ValueError(f"{key} and {other} are both {sign!r}, want two signs")
        return self

    @property
    def is_default(self) -> bool:
        """Whether all settings are the defaults."""
        return self == Dialect()
