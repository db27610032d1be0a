# SPDX-License-Identifier: Apache-2.0
"""`python -m whalefall.cli.doctor`: the doctor with the standard library alone, for when the command itself does not start."""

from __future__ import annotations

import argparse
import sys

from whalefall.cli.doctor.report import print_report, to_json
from whalefall.cli.doctor.run import DEFAULT_PORT, look_around


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m whalefall.cli.doctor", description="What is installed, what is wrong, how to mend it.")
    parser.add_argument("--json", action="store_true", dest="as_json")
    parser.add_argument("--strict", action="store_true", help="warnings count as failures")
    parser.add_argument("--no-gpu", action="store_true", help="no GPU is expected here")
    parser.add_argument("--installed-only", action="store_true", help="judge what is installed, not this machine")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    args = parser.parse_args()
    report = look_around(expect_gpu=not args.no_gpu, port=args.port, installed_only=args.installed_only)
    if args.as_json:
        print(to_json(report, args.strict))
    else:
        print_report(report, args.strict)
    return report.exit_code(args.strict)


if __name__ == "__main__":
    sys.exit(main())
