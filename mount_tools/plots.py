"""Pictures, for who has matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mount_tools.common import CommandError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure_for(path: Path) -> type[Figure]:
    """What to draw with. Asked for before the work begins: what is missing is told at once.
    Raises CommandError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CommandError(
            "--plot needs matplotlib; install it with: pip install 'kvfs[plot]'"
        ) from None
    if path.suffix.lower() != ".png":
        raise CommandError(f"{path} cannot be drawn: give it a name that ends in .png")
    if not path.parent.is_dir():
        raise CommandError(f"{path.parent} is no directory: --plot writes no file there")
    return Figure
