"""Run the commands in README.md and put their present output under them.

A block to renew stands between `<!-- output -->` and `<!-- end of output -->`; its first line is the command, after a
dollar sign.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCK = re.compile(
    r"(?P<open><!-- output -->\n```console\n)\$ (?P<command>[^\n]+)\n.*?(?P<close>```\n<!-- end of output -->)",
    re.DOTALL,
)


def renewed(block: re.Match[str]) -> str:
    """Return the block with the output that its command has now; stderr and a failure go to the caller."""
    command = block["command"]
    print(f"$ {command}", file=sys.stderr)
    run = subprocess.run(shlex.split(command), stdout=subprocess.PIPE, text=True, check=True)
    output = "\n".join(line.rstrip() for line in run.stdout.rstrip().splitlines())
    return f"{block['open']}$ {command}\n{output}\n{block['close']}"


def main() -> None:
    """Rewrite README.md."""
    text = README.read_text(encoding="utf-8")
    if BLOCK.search(text) is None:
        raise SystemExit(f"{README} has no block to renew")
    README.write_text(BLOCK.sub(renewed, text), encoding="utf-8")


if __name__ == "__main__":
    main()
