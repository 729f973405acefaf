"""Where and when a benchmark ran, for its report."""

import os
import platform
import subprocess
import time


def measured_where() -> dict[str, str]:
    """Machine with its load, date, and commit (empty outside of a git checkout)."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    return {"machine": machine, "date": time.strftime("%Y-%m-%d"), "commit": commit}
