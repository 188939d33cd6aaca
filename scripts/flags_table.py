"""Writes the flags table of README.md from the settings; `--check` only says whether it is so.

The table stands between two marks in README.md. Whoever adds a setting runs this script; a unit
test runs the check.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic_core import PydanticUndefined

from smg_grpc_servicer.settings import MlxSettings, ServingSettings, VllmSettings
from smg_wire.settings import Settings, flag, variable

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- flags table: begin -->\n", "<!-- flags table: end -->"


def table(settings: type[Settings], names: list[str]) -> str:
    """Return a Markdown table of the settings' fields of these names."""
    foreign: dict[str, list[str]] = {}
    for other, name in settings.foreign_variables.items():
        foreign.setdefault(name, []).append(other)
    rows = ["| flag | variable | default | what it does |", "|---|---|---|---|"]
    for name in names:
        declared = settings.model_fields[name]
        variables = [variable(name), *foreign.get(name, ())]
        text = (declared.description or "").split(" [env: ")[0].replace("|", "\\|")
        rows.append(
            f"| `{flag(name)}` | {', '.join(f'`{item}`' for item in variables)} "
            f"| {_default(declared.default)} | {text} |"
        )
    return "\n".join(rows) + "\n"


def _default(value: object) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    human_readable = getattr(value, "human_readable", None)
    return f"`{human_readable() if human_readable else value}`"


def section() -> str:
    """Return what stands between the marks: every worker's flags, then each engine's own."""
    shared = list(ServingSettings.model_fields)
    parts = [f"Every worker:\n\n{table(ServingSettings, shared)}"]
    for engine, settings in (("mlx", MlxSettings), ("vllm", VllmSettings)):
        own = [name for name in settings.model_fields if name not in shared]
        parts.append(f"`python -m smg_grpc_servicer.{engine}`:\n\n{table(settings, own)}")
    return "\n".join(parts)


def rewritten(readme: str) -> str:
    """Return the README with the section between its marks replaced."""
    head, rest = readme.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}{section()}{END}{tail}"


def main() -> int:
    """Write the table, or with --check return 1 if it is out of date."""
    now = README.read_text(encoding="utf-8")
    then = rewritten(now)
    if "--check" in sys.argv[1:]:
        if now != then:
            print("README.md: the flags table is out of date: python scripts/flags_table.py")
        return int(now != then)
    README.write_text(then, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
