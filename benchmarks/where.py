"""Where and when a benchmark ran, as its last line says it."""

import os
import platform
import subprocess
import time


def measured_where() -> dict[str, str]:
    """Machine and its load, date and commit."""
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": short_commit(),
    }


def short_commit() -> str:
    """The commit of the working folder's checkout, empty outside of one."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
