"""The README's table of flags is the settings' own."""

from __future__ import annotations

import flags_table


def test_the_readme_lists_every_flag_as_the_settings_declare_it() -> None:
    readme = flags_table.README.read_text(encoding="utf-8")
    assert flags_table.rewritten(readme) == readme, "run python scripts/flags_table.py"


def test_a_setting_is_shown_with_flag_variables_default_and_help() -> None:
    row = next(
        line for line in flags_table.section().splitlines() if line.startswith("| `--prefill-step")
    )
    assert row == (
        "| `--prefill-step-size` | `SMG_PREFILL_STEP_SIZE`, `MLX_PREFILL_STEP` | unset | Prompt "
        "tokens a prompt gives to one step; 2048 on Metal and 512 on CPU when unset. |"
    )
