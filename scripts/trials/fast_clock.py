"""The command with a clock that runs faster: fast_clock.py FACTOR SINCE_NS ARGUMENT...

What a daemon waits for by the time of day, such as the minute in which nothing that was used
is reclaimed, is over sooner. What it does by its own pace is not.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

_factor, _since_ns = int(sys.argv[1]), int(sys.argv[2])
_time_ns = time.time_ns
time.time_ns = lambda: _since_ns + _factor * (_time_ns() - _since_ns)
del sys.argv[1:3]

if __name__ == "__main__":
    from mount_tools.main import main

    main()
