"""`kvfs profile`: a profile to copy and change."""

from __future__ import annotations

from typing import Annotated

import typer

from kvfs.tiers import profiles
from kvfs.tiers.profiles import Profile, ProfileError
from mount_tools.arguments import complete_profile
from mount_tools.common import CommandError


def profile(
    chosen: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE",
            autocompletion=complete_profile,
            help=f"{', '.join(profiles.NAMES)}, or a file.",
        ),
    ],
) -> None:
    """Print a profile, to be copied and changed; refuses a file that a mount would refuse.

    \b
    Examples:
      kvfs profile gov > mine.toml
      kvfs profile mine.toml
    """
    load_profile(chosen)
    typer.echo(profiles.text_of(chosen), nl=False)


def load_profile(chosen: str) -> Profile:
    """Raises CommandError."""
    try:
        return profiles.load(chosen)
    except ProfileError as fault:
        raise CommandError(str(fault)) from None
