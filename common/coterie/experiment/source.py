"""Settings of all data sources: standardisation, the fold of a cross-validation, paths."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from coterie.experiment.settings import Settings

FilePath = Annotated[str, StringConstraints(min_length=1, max_length=4000, pattern=r"^[^\x00]+$")]
TestFraction = Annotated[float, Field(ge=0, lt=1)]
USER = "{user}"  # placeholder for the user's name in a path


class Fold(Settings):
    """One fold of a cross-validation on the users: some training rows of each user are held out, and replace its test rows.

    `coterie_client.data.split.fold_rows` deals the rows to folds. The real test rows are neither trained on nor evaluated.
    """

    number: int = Field(ge=1)
    of: int = Field(ge=2, le=1000)

    @model_validator(mode="after")
    def _number_is_one_of_them(self) -> Fold:
        if self.number > self.of:
            raise ValueError(f"number is {self.number}, want 1 to the {self.of} folds there are")
        return self


class SourceSettings(Settings):
    # Centre and scale the features by constants that the members agree on in a federated round of sums.
    standardize: bool = False
    fold: Fold | None = None

    @property
    def fills_missing(self) -> bool:
        """Whether missing cells of features are filled with means that the members agree on."""
        return False
