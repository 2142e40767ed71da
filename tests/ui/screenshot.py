"""The picture of docs/ui.md: `python tests/ui/screenshot.py docs/ui.png [--theme dark] [--width 1240]`."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from served import Server
from ui_browser import browser
from ui_load import Load

KEY = "sk-screenshot"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--width", type=int, default=1240)
    parser.add_argument("--height", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20, help="of load before the picture")
    args = parser.parse_args()
    server = Server("--api-key", KEY, "--max-num-seqs", "32")
    try:
        with Load(server.base, KEY, chats=6), browser() as running:
            page = running.new_page(
                viewport={"width": args.width, "height": args.height},
                color_scheme=args.theme,
            )
            page.add_init_script(f"sessionStorage.setItem('gapless-api-key', '{KEY}')")
            page.goto(f"{server.base}/ui")
            page.wait_for_timeout(args.seconds * 1000)
            page.screenshot(path=args.out)
    finally:
        server.stop()


if __name__ == "__main__":
    main()
