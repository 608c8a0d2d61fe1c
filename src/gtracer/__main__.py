"""`python -m gtracer` is `gtracer`."""

import sys

from gtracer.cli import main

if __name__ == "__main__":
    sys.exit(main())
