"""`kvfs monitoring`: where the rules for Prometheus and the dashboard for Grafana are."""

from __future__ import annotations

from pathlib import Path

from mount_tools.common import say

FOLDER = Path(__file__).parent
RULES, DASHBOARD = FOLDER / "alerts.yml", FOLDER / "dashboard.json"


def monitoring() -> None:
    """Print the folder with alerts.yml, rules for Prometheus, and dashboard.json, for Grafana.

    \b
    Examples:
      kvfs monitoring
      cp $(kvfs monitoring)/alerts.yml /etc/prometheus/kvfs.yml
    """
    say(str(FOLDER))
