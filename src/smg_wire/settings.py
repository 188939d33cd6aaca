"""How flags and environment variables become one typed, validated, immutable object.

A program subclasses `Settings` once. Every field is a flag (`drain_timeout` is
`--drain-timeout`) and a variable (`SMG_DRAIN_TIMEOUT`); the flag wins, then the variable, then
the default. No other module
reads a setting from the environment; what the system and the engines themselves define there
(XDG_CACHE_HOME, HF_HUB_OFFLINE) is read and set where it is used.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as PydanticSettingsError

from smg_wire.errors import SettingsError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

ENV_PREFIX = "SMG_"


def option(default: Any = ..., *, help: str, **constraints: Any) -> Any:  # noqa: A002
    """Declare a setting: its default (none means required), its help and pydantic constraints."""
    return Field(default, description=help, **constraints)


class Settings(BaseSettings):
    """Base of every program's settings.

    `foreign_variables` maps variables of other programs, honoured so that their users need not
    rename them, to a field; our own variable wins over a foreign one.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        cli_avoid_json=True,
        hide_input_in_errors=True,
    )

    foreign_variables: ClassVar[dict[str, str]] = {}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave files out, and put foreign variables behind ours."""
        del dotenv_settings, file_secret_settings
        foreign = {
            name: os.environ[variable]
            for variable, name in cls.foreign_variables.items()
            if os.environ.get(variable)
        }
        return init_settings, env_settings, InitSettingsSource(settings_cls, foreign)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Name each field's variable in its help, where a user looks for it."""
        super().__pydantic_init_subclass__(**kwargs)
        for name, declared in cls.model_fields.items():
            suffix = f"[env: {variable(name)}]"
            if declared.description and suffix not in declared.description:
                declared.description = f"{declared.description} {suffix}"


def flag(name: str) -> str:
    """Return the flag of a field."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of a field."""
    return ENV_PREFIX + name.upper()


SettingsT = TypeVar("SettingsT", bound=Settings)


def load(cls: type[SettingsT], argv: Sequence[str], *, prog: str) -> SettingsT:
    """Read flags, then the environment.

    `--help` prints and exits 0, as argparse does.

    Raises:
        SettingsError: a flag is unknown or a value is not allowed; one line that names the flag
            or the variable, the value and the limit.
    """
    try:
        source: Any = CliSettingsSource(cls, cli_prog_name=prog, cli_parse_args=list(argv))
        return cls(_cli_settings_source=source)  # type: ignore[call-arg]
    except PydanticSettingsError as error:
        raise SettingsError(_parser_line(error)) from error
    except ValidationError as error:
        raise SettingsError("; ".join(_lines(cls, argv, error))) from error


def split(cls: type[Settings], argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part words of a command line into those of a settings class and the rest, in order.

    For a program that takes another program's flags as well. A flag of ours must be spelled out.
    """
    ours: list[str] = []
    rest: list[str] = []
    flags = {flag(name): declared.annotation is bool for name, declared in cls.model_fields.items()}
    switches = {name.replace("--", "--no-", 1) for name, switch in flags.items() if switch}
    words = iter(argv)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in flags and name not in switches:
            rest.append(word)
            continue
        ours.append(word)
        if not equals and not flags.get(name, True):
            ours.extend(itertools.islice(words, 1))
    return ours, rest


def build_parser(cls: type[Settings], *, prog: str) -> argparse.ArgumentParser:
    """Return the argparse parser behind a settings class, for its help text."""
    source: Any = CliSettingsSource(cls, cli_prog_name=prog)
    parser: argparse.ArgumentParser = source.root_parser
    return parser


def _parser_line(error: PydanticSettingsError) -> str:
    return str(error).removeprefix("error parsing CLI: ").strip().replace("\n", " ")


def _lines(cls: type[Settings], argv: Sequence[str], error: ValidationError) -> Iterator[str]:
    for problem in error.errors(include_url=False, include_context=False):
        if not problem["loc"]:
            # A rule across fields: its text names them.
            yield problem["msg"].removeprefix("Value error, ")
            continue
        name = str(problem["loc"][0])
        where = _origin(cls, argv, name)
        if problem["type"] == "missing":
            yield f"{flag(name)} is required (or set {variable(name)})"
            continue
        reason = problem["msg"].removeprefix("Value error, ")
        value = "hidden" if _is_secret(cls, name) else repr(problem["input"])
        yield f"{where} is {value}: {reason[:1].lower()}{reason[1:]}"


def _is_secret(cls: type[Settings], name: str) -> bool:
    return name in cls.model_fields and "Secret" in str(cls.model_fields[name].annotation)


def _origin(cls: type[Settings], argv: Sequence[str], name: str) -> str:
    if any(word.split("=", 1)[0] in (flag(name), flag(f"no_{name}")) for word in argv):
        return flag(name)
    if os.environ.get(variable(name)) is not None:
        return variable(name)
    for foreign, field in reversed(cls.foreign_variables.items()):
        if field == name and os.environ.get(foreign):
            return foreign
    return flag(name)
