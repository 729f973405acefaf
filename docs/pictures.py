"""Draw the pictures of docs/pictures: `make pictures`, which needs Chromium for those of the page (CHROMIUM names it).

report-light.png, report-dark.png   the top of report.html, of the record in checkpoints/coder
threshold.svg                       one plot of that page
generate.svg                        `acceptance-heads generate` of the embedded models
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 680, 1135
NUM_COLOURS = 96
SCHEMES = {"light": 1, "dark": 0}
"""Colour scheme -> Chromium's number of it."""
CODER = ROOT / "checkpoints" / "coder"
RECORD = "runs/pictures"
THRESHOLD = "max_rejection_prob of head"
POLICY = "cumulative_token_prob:min_token_prob=0.2"
PROMPT = "Tom has 3 apples and buys 4 more. How many?"


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    generate = ("generate", "--config", "tiny", "--policy", POLICY, "--prompt", PROMPT, "--rejected", "true")
    run("decode", *generate, "--svg", str(PICTURES / "generate.svg"))
    shutil.rmtree(ROOT / RECORD, ignore_errors=True)
    shutil.copytree(CODER / "record", ROOT / RECORD)
    heads = ",".join(str(path.relative_to(ROOT)) for path in sorted((CODER / "heads").iterdir()))
    settings = {"config": "qwen2.5-coder", "decode.dir": RECORD, "decode.as_recorded": "true", "decode.ratios": "[]"}
    settings |= {"decode.t_draft_s": "0.01", "decode.t_target_s": "0.1", "decode.heads": f"[{heads}]"}
    run("evaluation", "evaluate", *(f"--{name}={value}" for name, value in settings.items()))
    plots = (ROOT / RECORD / "plots").glob("thresholds-*.svg")
    threshold = next(path for path in plots if f">{THRESHOLD}<" in path.read_text(encoding="utf-8"))
    shutil.copyfile(threshold, PICTURES / "threshold.svg")
    for scheme in SCHEMES:
        screenshot(ROOT / RECORD / "report.html", PICTURES / f"report-{scheme}.png", scheme)


def run(package: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", package, *arguments], cwd=ROOT, check=True)


def screenshot(page: Path, picture: Path, scheme: str) -> None:
    """The top of a page in one colour scheme, as a PNG of few colours."""
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("no chromium on the path; install it, or name a browser in CHROMIUM")
    settings = [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", f"--window-size={WIDTH},{HEIGHT}"]
    settings += ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1.5"]
    subprocess.run([browser, *settings, f"--screenshot={picture}", page.as_uri()], check=True, capture_output=True)
    Image.open(picture).convert("RGB").quantize(NUM_COLOURS).save(picture, optimize=True)


if __name__ == "__main__":
    main()
