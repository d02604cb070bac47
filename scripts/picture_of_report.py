"""Takes a picture of parts of a page of `jaxlowprec report`, in headless Chromium.

python scripts/picture_of_report.py report.html docs/pictures/healthy_run.png --parts findings,every-layer
"""

import argparse
import pathlib
import shutil

from playwright.sync_api import sync_playwright


def main() -> None:
    """Opens the page, hides the other parts, chooses what the options say and saves the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    parser.add_argument("--parts", default="findings,loss-section,every-layer,one-layer", help="ids, with commas")
    parser.add_argument("--run", help="the run whose layers are shown")
    parser.add_argument("--tensor")
    parser.add_argument("--statistic")
    parser.add_argument("--layer")
    parser.add_argument("--width", type=int, default=900, help="pixels")
    options = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": options.width, "height": 800}, color_scheme="light")
        page.goto(options.page.resolve().as_uri())
        page.wait_for_selector("#heatmap svg")
        for name in ("run", "tensor", "statistic", "layer"):
            if getattr(options, name):
                page.select_option(f"#{name}", getattr(options, name))
        page.evaluate(
            "parts => document.querySelectorAll('main > section').forEach(s => s.hidden ||= !parts.includes(s.id))",
            options.parts.split(","),
        )
        page.wait_for_timeout(500)
        page.locator("main").screenshot(path=options.picture)
        browser.close()


if __name__ == "__main__":
    main()
