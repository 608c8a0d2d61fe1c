"""What a value may be: pydantic checks it, and an error says so in one line. It needs no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import ConfigDict, Field, PlainValidator, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import ErrorDetails, PydanticCustomError

from gtracer.lab.errors import LabError, shown, unknown

# Nothing is converted (a word is no number, True is not 1), and NaN and infinity are no numbers.
STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid")
MOST = 5  # errors that are named
# Where pydantic's own words are those of Python.
PLAINLY = {
    "dict_type": "a mapping",
    "list_type": "a list",
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}


def must_be(allowed: str) -> WrapValidator:
    """What an error says of a value that the type before it does not take."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("refused", f"must be {allowed}") from None

    return WrapValidator(check)


def one_of(*choices: str) -> PlainValidator:
    """One of a few words."""
    allowed = f"must be one of {', '.join(map(repr, choices))}"

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value not in choices:
            raise PydanticCustomError("refused", allowed)
        return value

    return PlainValidator(check)


Count = Annotated[int, Field(ge=1, le=2**31 - 1), must_be(f"a whole number of at least 1 (and at most {2**31 - 1})")]
Units = Annotated[int, Field(ge=1, le=2**16), must_be(f"a whole number of at least 1 (and at most {2**16})")]
Flag = Annotated[bool, must_be("True or False")]
# A pattern is also what makes pydantic look at the characters: halves of one, which JSON can hold, are no text.
Words = Annotated[str, Field(pattern=""), must_be("text")]
Name = Annotated[
    str,
    Field(min_length=1, max_length=4096, pattern="^[^\x00-\x1f\x7f]*$"),
    must_be("a str, neither empty nor with control characters"),
]
Number = Annotated[float, must_be("a finite number")]
Positive = Annotated[float, Field(gt=0), must_be("a finite number above 0")]
AtLeastZero = Annotated[float, Field(ge=0), must_be("a finite number in [0, inf]")]
Share = Annotated[float, Field(ge=0, le=1), must_be("a finite number in [0, 1]")]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1), must_be("a finite number in [0, 1)")]
ShareAboveZero = Annotated[float, Field(gt=0, le=1), must_be("a finite number in (0, 1]")]
Scalar = Annotated[Words | bool | int | float, must_be("text, a number, or true or false")]
Place = Annotated[int, Field(ge=0, lt=2**63), must_be("a whole number of at least 0")]


def problems(error: ValidationError, what: str = "key", known: Collection[str] = ()) -> LabError:
    """All that is wrong, in one line; names that are none of the known with those that are near."""
    found = list(dict.fromkeys(_message(one, what, known) for one in error.errors(include_url=False)))
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    choices = f": choose from {', '.join(sorted(known))}"
    first, hint, others = "; ".join(found[:MOST] + more).partition(choices)  # which are said once
    return LabError(first + hint + others.replace(choices, ""))


def _message(error: ErrorDetails, what: str, known: Collection[str]) -> str:
    if error["type"] == "extra_forbidden":
        return str(unknown(what, error["loc"][-1], known))
    place = _place(error["loc"])
    if error["type"] == "missing":
        return f"there is no {place}"
    allowed = PLAINLY.get(error["type"]) or error["msg"].removeprefix("Input should be ").removeprefix("must be ")
    return f"{place} must be {allowed}, got {shown(error['input'])}"


def _place(loc: tuple[int | str, ...]) -> str:
    """Where a value stands.

    >>> _place(("betas", 1)), _place(("methods", "SAM", "vary"))
    ('betas[1]', "methods: 'SAM': 'vary'")
    """
    if loc and loc[-1] == "[key]":
        return f"a name in {_place(loc[:-2])}"
    first, *rest = loc or ("it",)
    return str(first) + "".join(f"[{part}]" if isinstance(part, int) else f": {shown(part)}" for part in rest)
